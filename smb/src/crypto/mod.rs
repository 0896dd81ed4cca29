//! Key derivation, signing and sealing ([MS-SMB2] 3.1.4).
