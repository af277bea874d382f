"""Files and bytes that other users may have written: reading, decoding within limits, checking who wrote them."""
