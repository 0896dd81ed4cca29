//! 8.3 names ([MS-FSCC] 2.1.5.2.1), which legacy programs request and use instead of long ones.
//!
//! Short names are not stored: a file's short name is derived from its name, and a lookup by short name compares the names of
//! the directory. Two files of a directory can have the same short name (one pair in two thousand million); then neither can
//! be found by it.

use std::borrow::Cow;

/// Characters before the extension of a generated short name.
const BASE: usize = 8;
/// Characters of the hash: five, and one after the tilde.
const HASH: usize = 6;
const DIGITS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// Whether a name is an 8.3 name, and therefore its own short name.
#[must_use]
pub fn is_short(name: &str) -> bool {
    let fits = |part: &str, max: usize| {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'()-@^_`{}~".contains(&byte);
        (1..=max).contains(&part.len()) && part.bytes().all(letter)
    };
    match name.split_once('.') {
        Some((base, extension)) => fits(base, 8) && fits(extension, 3),
        None => fits(name, 8),
    }
}

/// The short name of a file: the name itself, or one generated from its first character, a hash and its extension.
#[must_use]
pub fn of(name: &str) -> Cow<'_, str> {
    if is_short(name) {
        return Cow::Borrowed(name);
    }
    let (base, extension) = match name.rsplit_once('.') {
        // A name that begins with its only dot has no extension.
        Some((base, extension)) if !base.is_empty() => (base, extension),
        _ => (name, ""),
    };
    let digits = hash(name);
    let mut short = vec![usable(base).next().unwrap_or(b'_')];
    short.extend_from_slice(&digits[..HASH - 1]);
    short.extend_from_slice(&[b'~', digits[HASH - 1]]);
    let extension: Vec<u8> = usable(extension).take(3).collect();
    if !extension.is_empty() {
        short.push(b'.');
        short.extend(extension);
    }
    Cow::Owned(short.into_iter().map(char::from).collect())
}

fn usable(text: &str) -> impl Iterator<Item = u8> {
    text.bytes().filter(u8::is_ascii_alphanumeric).map(|byte| byte.to_ascii_uppercase())
}

/// The short name in a listing: empty if the name is its own short name, or `.` or `..`.
#[must_use]
pub fn listed(name: &str) -> Cow<'_, str> {
    if is_short(name) || matches!(name, "." | "..") { Cow::Borrowed("") } else { of(name) }
}

/// Whether a name has the form of a generated short name. Hardly any other name has it.
#[must_use]
pub fn may_be_made(name: &str) -> bool {
    let letter = |byte: &u8| byte.is_ascii_digit() || byte.is_ascii_uppercase();
    let (base, extension) = name.as_bytes().split_at(BASE.min(name.len()));
    let [first, hash @ .., b'~', last] = base else { return false };
    let has_base = hash.len() == HASH - 1
        && (letter(first) || *first == b'_')
        && hash.iter().all(letter)
        && letter(last);
    has_base
        && match extension {
            [] => true,
            [b'.', extension @ ..] => (1..=3).contains(&extension.len()) && extension.iter().all(letter),
            _ => false,
        }
}

/// Whether `short` is the short name generated from `name`. A name with a backslash does not exist for programs that use
/// short names.
#[must_use]
pub fn is_of(short: &str, name: &str) -> bool {
    may_be_made(short) && !name.contains('\\') && !is_short(name) && of(name) == short
}

/// FNV-1a, as [`HASH`] digits.
fn hash(name: &str) -> [u8; HASH] {
    let mut hash =
        name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    // The low bits of the product depend little on the last bytes.
    hash ^= hash >> 32;
    std::array::from_fn(|_| {
        let digit = DIGITS[(hash % 36) as usize];
        hash /= 36;
        digit
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn short_names_are_8_3() {
        for short in ["a", "A.B", "bufsize.txt", "12345678.123", "~!#$%.x"] {
            assert!(is_short(short) && of(short) == short, "{short}");
        }
        for long in ["", ".a", "a.", "123456789", "a.1234", "a.b.c", "a b", "a+b", "\u{e9}"] {
            assert!(!is_short(long), "{long}");
        }
    }

    #[test]
    fn generated_short_names_are_stable() {
        for (long, first, extension) in [
            ("a long name", "A", ""),
            ("report of 2026.html", "R", ".HTM"),
            (".gitignore", "G", ""),
            ("archive.tar.gz", "A", ".GZ"),
            ("\u{e9}t\u{e9}.txt", "T", ".TXT"),
            ("\u{65e5}\u{672c}", "_", ""),
            ("a.b c", "A", ".BC"),
            ("trailing.", "T", ""),
        ] {
            let short = of(long);
            assert!(is_short(&short) && may_be_made(&short) && is_of(&short, long), "{long}: {short}");
            assert!(short.starts_with(first) && &short[8..] == extension, "{long}: {short}");
            assert_eq!(short, of(long));
        }
        // Clients may have stored it.
        assert_eq!(of("a long name"), "A5OE30~7");
    }

    #[test]
    fn short_names_rarely_collide() {
        let shorts: HashSet<String> =
            (0..20_000).map(|i| of(&format!("sample-{i:09}.jpeg")).into_owned()).collect();
        assert!(shorts.len() >= 19_990, "{}", shorts.len());
    }

    #[test]
    fn other_names_are_not_taken_for_generated_short_names() {
        for name in [
            "",
            "A",
            "AAAAAA~",
            "AAAAAA~1x",
            "AAAAAA~1.",
            "AAAAAA~1.ABCD",
            "aAAAAA~1",
            "AAAAAa~1",
            "AAAAA~1",
            "AAAAAAA~1",
            "AAAAAA~1.A.B",
            "AAAAAA-1",
            "\u{e9}AAAA~1",
            "AAAAAA~\u{e9}",
            "AAAAA\u{e9}~1",
        ] {
            assert!(!may_be_made(name), "{name}");
        }
        assert!(may_be_made("AAAAAA~1") && may_be_made("_00000~Z.TXT"));
        assert!(!is_of("AAAAAA~1", "AAAAAA~1"), "a short name is not generated from itself");
        let separated = r"a long\name";
        assert!(!is_of(&of(separated), separated), "an invalid SMB name");
    }
}
