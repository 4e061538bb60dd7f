# Web server, worker and beat: the control plane, without torch.
# Build from the repository's root: docker build -f docker/web.Dockerfile -t archipelago-web .
FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    ARCHIPELAGO_VAR=/var/lib/archipelago

RUN useradd --system --uid 10001 --home-dir /var/lib/archipelago --create-home archipelago
WORKDIR /srv/archipelago

COPY requirements/server.txt requirements/server.txt
RUN pip install -r requirements/server.txt

# Only a worker that runs local replicas needs torch. TORCH_BACKEND is uv's: cpu, auto, cu130, ...
ARG TORCH=""
ARG TORCH_BACKEND=cpu
RUN if [ -n "$TORCH" ]; then pip install uv \
      && uv pip install --system --no-cache --torch-backend="$TORCH_BACKEND" "torch==$TORCH"; fi

COPY manage.py ./
COPY diloco diloco
COPY executors executors
COPY runs runs
COPY dashboard dashboard
COPY templates templates
COPY static static
# The server sends the compressed files to clients that accept them.
RUN python -m whitenoise.compress --quiet static

USER archipelago
VOLUME /var/lib/archipelago
EXPOSE 8000
# The services' commands are in docker-compose.yml.
CMD ["python", "-m", "uvicorn", "dashboard.asgi:application", "--host", "0.0.0.0", "--port", "8000", \
     "--timeout-graceful-shutdown", "5", "--lifespan", "off", "--no-proxy-headers", "--no-access-log", "--log-level", "warning"]
