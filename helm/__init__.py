"""The chart in `helm/tandem`, and the generator of its generated parts (`python -m helm.generate`)."""
