//! Messages of [MS-SMB2] and information classes of [MS-FSCC].
