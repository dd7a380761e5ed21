//! Graceful restart, of Tortie and of the peer.
