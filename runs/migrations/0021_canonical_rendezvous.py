from diloco.store.location import BadLocation, canonical
from django.db import migrations


def rewrite(apps, schema_editor):
    """One spelling per place, so that prefixes can be compared as text. What cannot be brought into
    that form stays as it is."""
    Run = apps.get_model("runs", "Run")
    for pk, uri in Run.objects.values_list("pk", "rendezvous").iterator():
        try:
            found = canonical(uri).uri
        except (BadLocation, OSError, ValueError):
            continue
        if found != uri and len(found) <= 500:
            Run.objects.filter(pk=pk).update(rendezvous=found)


class Migration(migrations.Migration):
    dependencies = [("runs", "0020_control_and_ingest")]
    operations = [migrations.RunPython(rewrite, migrations.RunPython.noop)]
