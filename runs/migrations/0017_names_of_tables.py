"""Tables as people call them in the admin."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("runs", "0016_cosine_and_sample")]

    operations = [
        migrations.AlterModelOptions(
            name="apitoken", options={"ordering": ("-id",), "verbose_name": "API token"}
        ),
        migrations.AlterModelOptions(
            name="webhookdelivery",
            options={
                "ordering": ("-created_at", "-id"),
                "verbose_name_plural": "webhook deliveries",
            },
        ),
    ]
