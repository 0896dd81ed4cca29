//! The time of a snapshot in the mount option `snapshot`: either `@GMT-YYYY.MM.DD-HH.MM.SS` ([MS-SMB2] 2.2.32.2), as in
//! `smbinfo list-snapshots` and mount.cifs, or the FILETIME that the kernel uses.

/// Seconds from the FILETIME epoch (1601) to the Unix epoch.
const UNIX_EPOCH_S: i64 = 11_644_473_600;
/// FILETIME counts units of 100 ns.
const TICKS_PER_S: u64 = 10_000_000;

/// Parses the FILETIME of a snapshot; `None` if the text is invalid.
pub(crate) fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("@GMT-") {
        Some(token) => filetime(token),
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok().filter(|time| *time > 0),
        None => None,
    }
}

fn filetime(token: &str) -> Option<u64> {
    let (date, time) = token.split_once('-')?;
    let [year, month, day] = numbers(date, [4, 2, 2])?;
    let [hour, minute, second] = numbers(time, [2, 2, 2])?;
    if !(1601..=9999).contains(&year) || !(1..=12).contains(&month) || hour > 23 || minute > 59 || second > 59
    {
        return None;
    }
    if !(1..=days_in(year, month)).contains(&day) {
        return None;
    }
    let seconds = days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    u64::try_from(seconds + UNIX_EPOCH_S).ok()?.checked_mul(TICKS_PER_S)
}

/// Parses numbers that are separated by dots, each with the given number of digits.
fn numbers(text: &str, digits: [usize; 3]) -> Option<[i64; 3]> {
    let mut parts = text.split('.');
    let mut found = [0; 3];
    for (number, digits) in found.iter_mut().zip(digits) {
        let part = parts.next()?;
        if part.len() != digits || !part.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        *number = part.parse().ok()?;
    }
    parts.next().is_none().then_some(found)
}

fn days_in(year: i64, month: i64) -> i64 {
    let next = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    days_since_1970(next.0, next.1, 1) - days_since_1970(year, month, 1)
}

/// Days in the Gregorian calendar. Years begin in March, so that a leap day is the last day of its year.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year / 4 - year / 100 + year / 400;
    year * 365 + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gmt_tokens_and_filetimes_are_parsed() {
        for (token, unix) in [
            ("@GMT-1970.01.01-00.00.00", 0),
            ("@GMT-2000.02.29-00.00.00", 951_782_400),
            ("@GMT-2000.03.01-00.00.00", 951_868_800),
            ("@GMT-2025.11.25-16.12.09", 1_764_087_129),
            ("@GMT-2026.12.31-23.59.59", 1_798_761_599),
            ("@GMT-2100.03.01-00.00.00", 4_107_542_400),
        ] {
            assert_eq!(parse(token), Some((unix + 11_644_473_600) * 10_000_000), "{token}");
        }
        assert_eq!(parse("@GMT-1601.01.01-00.00.01"), Some(10_000_000));
        assert_eq!(parse("134084647290000000"), Some(134_084_647_290_000_000));
    }

    #[test]
    fn invalid_snapshot_times_are_refused() {
        for bad in [
            "",
            "0",
            "-1",
            "yesterday",
            "99999999999999999999",
            "@GMT-",
            "@GMT-2025.11.25",
            "@GMT-2025.02.29-00.00.00",
            "@GMT-2025.13.01-00.00.00",
            "@GMT-2025.11.00-00.00.00",
            "@GMT-2025.11.25-24.00.00",
            "@GMT-2025.11.25-00.00.60",
            "@GMT-2025.11.25-00.00.00.00",
            "@GMT-2025.11.25-0.00.000",
            "@GMT-+025.11.25-00.00.00",
            "@GMT-1600.12.31-23.59.59",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
