"""GPipe's massively multilingual translation: one Transformer between English and 96 languages."""
