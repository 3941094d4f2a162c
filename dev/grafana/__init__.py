"""The dashboards of the chart in Python, and the model and drawing of dashboards."""
