"""Default date format of Django, e.g. in the admin: sortable and with seconds, as in logs and API.
Loaded by ``FORMAT_MODULE_PATH``:
https://docs.djangoproject.com/en/stable/topics/i18n/formatting/#creating-custom-format-files"""
