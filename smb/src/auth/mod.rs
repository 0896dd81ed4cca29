//! SPNEGO ([RFC 4178], [MS-SPNG]) and NTLMv2 ([MS-NLMP]), acceptor side (and a client side for tests).
