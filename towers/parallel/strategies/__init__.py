"""The synchronous strategies, one a file, and the contract that they meet."""
