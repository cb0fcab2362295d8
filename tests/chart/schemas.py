"""Kubernetes' own schemas. kubernetes_validate parses some megabytes of them for each object; here each file once."""

import functools

from kubernetes_validate import utils

utils.schema_contents = functools.cache(utils.schema_contents)
validate = utils.validate
