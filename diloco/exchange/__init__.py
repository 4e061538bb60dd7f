"""One round's exchange: payloads, uploads, reduction and what an observer sees."""
