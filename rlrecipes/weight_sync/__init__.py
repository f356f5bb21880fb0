"""Weights from trainer ranks to engines: buckets, transports, versions and checksums."""
