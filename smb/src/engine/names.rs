//! Names and patterns as clients send them ([MS-SMB2] 2.2.13, [MS-FSCC] 2.1.5, [MS-FSA] 2.1.4.3, 2.1.4.4).

use crate::fs::{RelPath, StreamName};
use crate::status::NtStatus;

/// Patterns longer than any name match nothing. Matching takes time proportional to the length of the pattern times that of
/// the name.
pub(crate) const PATTERN_CHARS_MAX: usize = 255;

/// A path in a CREATE, rename or link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) path: RelPath,
    /// The name ended in `\`, so it can only denote a directory.
    pub(crate) directory: bool,
    /// The stream, if the name has one.
    pub(crate) stream: Option<Stream>,
}

/// The stream in a name, after the first `:` ([MS-FSCC] 2.1.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// `::$DATA`: the contents of the file itself.
    Default,
    Named(StreamName),
}

/// Parses the part of a name after the first `:`: a stream's name, its type or both.
///
/// # Errors
/// `STATUS_OBJECT_NAME_INVALID` for types other than `$DATA` and for invalid stream names.
pub(crate) fn parse_stream(text: &str) -> Result<Stream, NtStatus> {
    let name = match text.split_once(':') {
        None => text,
        Some((name, kind)) if kind.eq_ignore_ascii_case("$DATA") => name,
        Some(_) => return Err(NtStatus::OBJECT_NAME_INVALID),
    };
    match (name, text) {
        ("", text) if !text.is_empty() => Ok(Stream::Default),
        (name, _) => StreamName::new(name).map(Stream::Named),
    }
}

/// Whether a character is invalid in names ([MS-FSCC] 2.1.5.2). Clients that have such names map the characters to others.
fn forbidden(c: char) -> bool {
    matches!(c, '\0'..='\x1f' | '"' | '*' | '/' | '<' | '>' | '?' | '|' | ':')
}

/// Parses a name: components separated by `\`.
///
/// # Errors
/// `STATUS_OBJECT_NAME_INVALID` for characters that are invalid in names and for streams without a file;
/// `STATUS_OBJECT_PATH_SYNTAX_BAD` for `..`, `.` and empty components.
pub(crate) fn parse(name: &str) -> Result<Name, NtStatus> {
    let (name, stream) = match name.split_once(':') {
        None => (name, None),
        Some(("", _)) => return Err(NtStatus::OBJECT_NAME_INVALID),
        Some((file, stream)) => (file, Some(parse_stream(stream)?)),
    };
    let (name, directory) = match name.strip_suffix('\\') {
        Some(before) if !before.is_empty() => (before, true),
        _ => (name, false),
    };
    if name.contains(forbidden) || directory && stream.is_some() {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    Ok(Name { path: RelPath::new(&name.replace('\\', "/"))?, directory, stream })
}

/// Parses a name of the POSIX extensions: components of any other characters, separated by `/` ([SMB2-POSIX] 2.2.13).
///
/// # Errors
/// `STATUS_OBJECT_NAME_INVALID` and `STATUS_OBJECT_PATH_SYNTAX_BAD`, as for [`parse`].
pub(crate) fn parse_posix(name: &str) -> Result<Name, NtStatus> {
    let (name, directory) = match name.strip_suffix('/') {
        Some(before) if !before.is_empty() => (before, true),
        _ => (name, false),
    };
    Ok(Name { path: RelPath::posix(name)?, directory, stream: None })
}

/// Whether the name in a repeated CREATE denotes the open file at `path`, and its `stream`.
pub(crate) fn denotes(name: &str, posix: bool, path: &RelPath, stream: Option<&StreamName>) -> bool {
    let name = if posix { parse_posix(name) } else { parse(name) };
    name.is_ok_and(|name| {
        let named = match &name.stream {
            Some(Stream::Named(stream)) => Some(stream),
            Some(Stream::Default) | None => None,
        };
        name.path == *path && named == stream
    })
}

/// Whether a pattern is a plain name.
pub(crate) fn is_plain(pattern: &str) -> bool {
    !pattern.contains(['*', '?', '<', '>', '"'])
}

/// Whether `name` matches `pattern` ([MS-FSA] 2.1.4.4), case-sensitively. Takes time proportional to the product of their
/// lengths for any pattern.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    if pattern == "*" {
        return true;
    }
    if is_plain(pattern) {
        return pattern == name;
    }
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let last_dot = name.iter().rposition(|c| *c == '.');
    // `rest[p]`: whether the pattern from position `p` matches the name from position `n`.
    let mut rest = vec![false; pattern.len() + 1];
    rest[pattern.len()] = true;
    for p in (0..pattern.len()).rev() {
        rest[p] = matches!(pattern[p], '*' | '<' | '>' | '"') && rest[p + 1];
    }
    for n in (0..name.len()).rev() {
        let after = std::mem::replace(&mut rest, vec![false; pattern.len() + 1]);
        let c = name[n];
        for p in (0..pattern.len()).rev() {
            rest[p] = match pattern[p] {
                '*' => rest[p + 1] || after[p],
                '?' => after[p + 1],
                // DOS_STAR: anything up to the last dot, where the pattern continues.
                '<' => rest[p + 1] || if last_dot == Some(n) { after[p + 1] } else { after[p] },
                // DOS_QM: one character, or nothing before a dot or the end.
                '>' => {
                    if c == '.' {
                        rest[p + 1]
                    } else {
                        after[p + 1]
                    }
                }
                // DOS_DOT: a dot, or nothing at the end.
                '"' => c == '.' && after[p + 1],
                literal => literal == c && after[p + 1],
            };
        }
    }
    rest[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smb_names_are_parsed_into_paths() {
        let ok = |name: &str| parse(name).map(|n| n.path.as_str().to_owned());
        assert_eq!(ok(""), Ok(String::new()));
        assert_eq!(ok(r"a\b c\d.txt"), Ok("a/b c/d.txt".to_owned()));
        assert_eq!(ok(r"file::$data"), Ok("file".to_owned()));
        assert_eq!(ok("\u{f03a}\u{e9}"), Ok("\u{f03a}\u{e9}".to_owned()));
        assert!(parse(r"dir\").expect("a directory").directory);
        for bad in ["::$DATA", ":a", "a*", "a/b", "a?b", "a\u{1}", "a\"b", "<", ">", "|"] {
            assert_eq!(parse(bad), Err(NtStatus::OBJECT_NAME_INVALID), "{bad}");
        }
        for bad in [r"..\..", r"a\..\b", r"a\\b", r".\a", r"\a"] {
            assert_eq!(parse(bad), Err(NtStatus::OBJECT_PATH_SYNTAX_BAD), "{bad}");
        }
    }

    #[test]
    fn stream_names_are_parsed_and_validated() {
        let stream = |name: &str| parse(name).map(|name| name.stream);
        let named = |name: &str| Ok(Some(Stream::Named(StreamName::new(name).expect("a name"))));
        assert_eq!(stream("a"), Ok(None));
        assert_eq!(stream("a::$Data"), Ok(Some(Stream::Default)));
        assert_eq!(stream("d\\a:b"), named("b"));
        assert_eq!(stream("a:B:$DATA"), named("b"), "case does not matter");
        assert_eq!(stream("a:?*\u{5}\n"), named("?*\u{5}\n"));
        assert_eq!(stream(&format!("a:{}", "n".repeat(255))), named(&"n".repeat(255)));
        for bad in ["a:", "a:b:", "a::", "a:b:$FOO", "a:b:c:$DATA", "a:b\\c", "a:b/c", "d\\:b", "a*:b", ":b"]
        {
            assert_eq!(stream(bad), Err(NtStatus::OBJECT_NAME_INVALID), "{bad}");
        }
        assert_eq!(stream(&format!("a:{}", "n".repeat(256))), Err(NtStatus::OBJECT_NAME_INVALID));
        let numbers = ["Name", "name", "nAME"].map(|name| StreamName::new(name).expect("a name").number());
        assert!(numbers.iter().all(|number| *number == numbers[0] && *number != 0));
    }

    #[test]
    fn names_are_matched_with_the_path_and_stream_of_an_open() {
        let path = RelPath::new("d/f").expect("a path");
        let stream = StreamName::new("s").expect("a name");
        assert!(denotes(r"d\f", false, &path, None) && denotes(r"d\f::$DATA", false, &path, None));
        assert!(denotes("d/f", true, &path, None), "as POSIX clients write it");
        assert!(denotes(r"d\f:S", false, &path, Some(&stream)));
        for (name, posix) in [(r"d\f:s", false), (r"d\g", false), ("d/f", false), (r"d\f", true)] {
            assert!(!denotes(name, posix, &path, None), "{name}");
        }
        assert!(!denotes(r"d\f", false, &path, Some(&stream)));
    }

    #[test]
    fn posix_names_allow_any_character_except_slash_and_nul() {
        let ok = |name: &str| parse_posix(name).map(|n| n.path.as_str().to_owned());
        for name in ["", "a/b", r"a\b", "a:b", "a*?\"<>|", "a\u{1}", "CON", "a. "] {
            assert_eq!(ok(name), Ok(name.to_owned()));
        }
        assert!(parse_posix("dir/").expect("a directory").directory);
        for bad in ["/a", "a//b", "..", "a/../b", "./a", "/"] {
            assert_eq!(ok(bad), Err(NtStatus::OBJECT_PATH_SYNTAX_BAD), "{bad}");
        }
        assert_eq!(ok("a\0"), Err(NtStatus::OBJECT_NAME_INVALID));
    }

    #[test]
    fn search_patterns_match_as_on_windows() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "a.b", true),
            ("*.*", "a", false),
            ("*.*", "a.b", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*.txt", "x.txt", true),
            ("*.txt", "x.TXT", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b*", "xxbxxaxx", false),
            ("<.txt", "a.b.txt", true),
            ("<\"*", "noext", true),
            ("<\"*", "a.b", true),
            ("<", "a.b", false),
            ("<", "ab", true),
            ("<b", "a.b", true),
            (">>>", "ab", true),
            (">>>", "abcd", false),
            ("a>>.t", "ab.t", true),
            ("a\"", "a", true),
            ("a\"", "a.", true),
            ("a\"", "ab", false),
            ("???", "abc", true),
            ("???", "ab", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern:?} on {name:?}");
        }
    }

    #[test]
    fn a_hostile_pattern_causes_no_exponential_backtracking() {
        let pattern = "*a".repeat(PATTERN_CHARS_MAX / 2);
        let name = "a".repeat(100);
        // Exponential backtracking would not finish.
        assert!(!matches(&pattern, &name));
    }
}
