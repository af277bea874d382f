"""What others wrote, or could: how it is read, what it may take to decode, and who could have put it there."""
