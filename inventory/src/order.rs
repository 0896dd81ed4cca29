//! Order of device names: `mlx5_2` comes before `mlx5_10`.

use std::cmp::Ordering;

/// Compares runs of digits by value, and everything else by bytes.
pub(crate) fn compare(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    loop {
        let (x, y) = (take(&mut left), take(&mut right));
        let order = match (number(x), number(y)) {
            (Some(m), Some(n)) => m.len().cmp(&n.len()).then_with(|| m.cmp(n)),
            _ => x.cmp(y),
        };
        if order != Ordering::Equal {
            return order;
        }
        if x.is_empty() {
            // `01` and `1` have equal values, so the texts decide.
            return a.cmp(b);
        }
    }
}

/// Returns the run of digits or non-digits at the beginning of `rest`.
fn take<'a>(rest: &mut &'a str) -> &'a str {
    let digits = rest.starts_with(|c: char| c.is_ascii_digit());
    let end = rest.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(rest.len());
    let (run, after) = rest.split_at(end);
    *rest = after;
    run
}

/// Returns the digits of a run without leading zeros, so that a longer number is larger.
fn number(run: &str) -> Option<&str> {
    run.starts_with(|c: char| c.is_ascii_digit()).then(|| run.trim_start_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_are_compared_by_value() {
        let mut names = ["mlx5_10", "mlx5_2", "mlx5_1", "bnxt_re0", "mlx5_bond_0", "mlx5_02", "mlx5", ""];
        names.sort_by(|a, b| compare(a, b));
        assert_eq!(names, ["", "bnxt_re0", "mlx5", "mlx5_1", "mlx5_02", "mlx5_2", "mlx5_10", "mlx5_bond_0"]);
    }
}
