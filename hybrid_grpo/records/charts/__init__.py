"""What the page, the report and model cards draw of a run's metrics. Nothing here needs torch."""
