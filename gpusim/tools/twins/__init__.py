"""Ask real engines which fold their all-reduce is, and compare the twins with them."""
