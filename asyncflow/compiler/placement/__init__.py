"""Which device, and which of its streams, is each node on, and what does it cost there?"""
