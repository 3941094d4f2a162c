"""The dashboards of the chart as Python, and what a dashboard is made of."""
