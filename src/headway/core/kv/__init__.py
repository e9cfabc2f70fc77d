"""The bookkeeping of KV memory: which block holds which tokens. The bytes themselves are not handled here."""
