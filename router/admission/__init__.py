"""Which requests the router admits: limits, a fair queue, rejections. Start at controller.py; see docs/admission.md."""
