"""Gateway: the OpenAI-compatible endpoint that agents talk to.

It decides which recorded call a request continues, has the worker capture the new one, and lets a response end only
when the call is in custody. It never sees a token id. `python -m workbench.gateway` runs one; `process.GatewayProcess`
starts and stops it, `client.ControlClient` closes rollouts.
"""
