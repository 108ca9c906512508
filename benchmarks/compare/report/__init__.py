"""What the stored cells say: ratios, tables and pictures."""
