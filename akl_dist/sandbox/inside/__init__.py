"""What runs inside the sandbox, and the codec both sides share. Standard library only; nothing here knows an expected value."""
