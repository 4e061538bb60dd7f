"""How dates are written where nothing else says, as in the admin: sortable and with seconds, as in
logs and the API. Read by ``FORMAT_MODULE_PATH``:
https://docs.djangoproject.com/en/stable/topics/i18n/formatting/#creating-custom-format-files"""
