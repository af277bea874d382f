"""Files and models as people have them: those read rightly, refused with a remedy, or read wrongly."""
