"""Charts, and the page of one run or several."""
