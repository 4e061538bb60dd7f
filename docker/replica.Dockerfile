# One replica: torch, fsspec and the replica library; no Django, no Celery.
# docker build -f docker/replica.Dockerfile -t archipelago-replica .
# docker run -e REPLICA_RANK=0 -e AWS_ACCESS_KEY_ID=... archipelago-replica s3://bucket/runs/<run>
FROM python:3.12-slim

ARG TORCH=2.13.0
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1

RUN useradd --system --uid 10001 --create-home replica
WORKDIR /srv/archipelago

COPY requirements/replica.txt requirements/replica.txt
# pip's own configuration (e.g. a PIP_INDEX_URL build secret) decides between CPU and CUDA.
RUN pip install "torch==$TORCH" -r requirements/replica.txt

COPY diloco diloco

USER replica
ENTRYPOINT ["python", "-m", "diloco.replica"]
