"""The reference operations: signature, validation and dispatch, one module each."""
