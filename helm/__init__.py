"""The chart in `helm/tandem`, and what makes the parts of it that nobody writes (`python -m helm.generate`)."""
