"""Which block of KV memory holds what: bookkeeping only, no bytes."""
