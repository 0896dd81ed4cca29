//! Human-readable sizes and ages.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// Formats a size, such as `512Mi`, `1.5Gi`, `12Ti`.
pub(crate) fn bytes(bytes: i64) -> String {
    const UNITS: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if bytes < 1024 {
        return bytes.to_string();
    }
    // In tenths, rounded down, so that space shown as free exists.
    let mut tenths = i128::from(bytes) * 10 / 1024;
    let mut unit = 0;
    while tenths >= 10 * 1024 && unit + 1 < UNITS.len() {
        tenths /= 1024;
        unit += 1;
    }
    match (tenths / 10, tenths % 10) {
        (whole, 0) => format!("{whole}{}", UNITS[unit]),
        (whole, _) if whole >= 100 => format!("{whole}{}", UNITS[unit]),
        (whole, tenth) => format!("{whole}.{tenth}{}", UNITS[unit]),
    }
}

/// Formats an age as kubectl does, such as `42s`, `5m`, `3h`, `12d`.
pub(crate) fn age(since: Option<&Time>, now: Timestamp) -> String {
    let Some(since) = since else { return String::new() };
    let seconds = now.duration_since(since.0).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_formatted_with_binary_prefixes() {
        for (size, text) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1Ki"),
            (1 << 30, "1Gi"),
            (3 << 29, "1.5Gi"),
            ((1 << 40) - 1, "1023Gi"),
            (123 * (1 << 30) + (1 << 29), "123Gi"),
            (i64::MAX, "7.9Ei"),
            (-5, "-5"),
        ] {
            assert_eq!(bytes(size), text);
        }
    }

    #[test]
    fn ages_are_formatted_with_a_single_unit() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        for (seconds, text) in
            [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d"), (-5, "0s")]
        {
            assert_eq!(age(Some(&Time(at(1000))), at(1000 + seconds)), text);
        }
        assert_eq!(age(None, at(0)), "");
    }
}
