"""The size of each pool. It decides by the signals in signals.py and the rules in decide.py; loop.py applies them."""
