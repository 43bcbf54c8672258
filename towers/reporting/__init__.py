"""Figures as charts, pages, pictures, summaries and lines of progress."""
