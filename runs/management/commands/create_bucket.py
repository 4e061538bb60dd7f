"""``manage.py create_bucket``: create the bucket of the default rendezvous if it is missing."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError


class Command(BaseCommand):
    help = "Create the S3 bucket of ARCHIPELAGO_RENDEZVOUS unless it exists. Other URIs need none."

    def handle(self, *args: Any, **options: Any) -> None:
        uri = urlsplit(settings.DEFAULT_RENDEZVOUS)
        if uri.scheme != "s3":
            self.stdout.write(f"nothing to do: {settings.DEFAULT_RENDEZVOUS} is not an S3 bucket")
            return
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.client("s3")
        try:
            client.head_bucket(Bucket=uri.netloc)
            self.stdout.write(f"the bucket {uri.netloc} exists")
            return
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise CommandError(f"the bucket {uri.netloc} cannot be used: {error}") from error
        except BotoCoreError as error:
            raise CommandError(f"the store cannot be reached: {error}") from error
        try:
            client.create_bucket(Bucket=uri.netloc)
        except (BotoCoreError, ClientError) as error:
            raise CommandError(f"the bucket {uri.netloc} cannot be created: {error}") from error
        self.stdout.write(f"created the bucket {uri.netloc}")
