"""Adapters to the hosts that ptm_accel works inside of, one package each. Shipped as `ptm_accel.integrations`.

The core never imports an adapter; an adapter imports the core. Inside this folder, adapters import one another
relatively, so that they resolve the same from a checkout and when installed.
"""
