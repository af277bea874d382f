"""Files and models as people have them: what is read rightly, refused with a remedy, or read wrongly."""
