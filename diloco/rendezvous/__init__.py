"""The torch-free contract that replicas and the control plane share.

Settings, object paths, record formats, the store and the round's decision core live here, so
that both sides read and write the bucket with one piece of code.
"""
