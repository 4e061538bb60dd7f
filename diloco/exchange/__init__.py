"""The exchange of one round: payloads, uploads, reduction, and the observer's view of the round."""
