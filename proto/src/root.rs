//! Owner and mode of a volume's root, as users write them.

/// Uid and gid of `UID` or `UID:GID`; `None` if it is neither. All ones mean no change for chown(2), so they are no id.
#[must_use]
pub fn owner(text: &str) -> Option<(u32, Option<u32>)> {
    let id = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
        true => text.parse().ok().filter(|id| *id != u32::MAX),
        false => None,
    };
    match text.split_once(':') {
        None => Some((id(text)?, None)),
        Some((uid, gid)) => Some((id(uid)?, Some(id(gid)?))),
    }
}

/// Permission bits in octal, at most 7777; `None` if it is something else.
#[must_use]
pub fn mode(text: &str) -> Option<u32> {
    let is_octal = (1..=5).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    is_octal.then(|| u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777)).flatten()
}
