//! Intervals with owners. Checking whether one of them meets a range takes as many steps as a balanced tree is high.
//!
//! An AVL tree ordered by first byte. Each node stores how far the intervals below it reach. An interval without length
//! lies between two bytes: it meets intervals that have bytes on both sides of it.

use std::cmp::Ordering;

use crate::ids::FileId;

/// The first byte, and a number that is unique in the set.
pub(in crate::engine) type Key = (u64, u64);

/// A set of intervals.
#[derive(Default)]
pub(in crate::engine) struct Intervals {
    root: Link,
}

type Link = Option<Box<Node>>;

struct Node {
    key: Key,
    reach: Reach,
    /// The farthest ends in the subtree.
    farthest: Farthest,
    height: u8,
    left: Link,
    right: Link,
}

/// The end of an interval: the first byte after it, which can be 2^64.
#[derive(Clone, Copy)]
struct Reach {
    end: u128,
    owner: FileId,
}

/// The farthest end, and the farthest end of any other owner: enough to exclude any one owner.
#[derive(Clone, Copy, Default)]
struct Farthest {
    first: Option<Reach>,
    second: Option<Reach>,
}

impl Farthest {
    fn with(self, reach: Reach) -> Self {
        match self.first {
            None => Self { first: Some(reach), second: None },
            Some(first) if first.owner == reach.owner => {
                let farther = if reach.end > first.end { reach } else { first };
                Self { first: Some(farther), ..self }
            }
            Some(first) if reach.end > first.end => Self { first: Some(reach), second: Some(first) },
            Some(_) if self.second.is_none_or(|second| reach.end > second.end) => {
                Self { second: Some(reach), ..self }
            }
            Some(_) => self,
        }
    }

    fn and(self, other: Self) -> Self {
        other.first.into_iter().chain(other.second).fold(self, Self::with)
    }

    /// Whether an interval reaches beyond the byte `start`, not counting those of `except`.
    fn beyond(&self, start: u64, except: Option<FileId>) -> bool {
        let counts = |reach: &Reach| Some(reach.owner) != except;
        let farthest = self.first.filter(counts).or(self.second);
        farthest.is_some_and(|reach| reach.end > start.into())
    }
}

impl Intervals {
    pub(in crate::engine) fn insert(&mut self, key: Key, length: u64, owner: FileId) {
        let reach = Reach { end: u128::from(key.0) + u128::from(length), owner };
        self.root = Some(insert(self.root.take(), key, reach));
    }

    pub(in crate::engine) fn remove(&mut self, key: Key) {
        self.root = remove(self.root.take(), key);
    }

    /// Whether an interval meets the `length` bytes from `start`, not counting those of `except`.
    pub(in crate::engine) fn meets(&self, start: u64, length: u64, except: Option<FileId>) -> bool {
        // Of the intervals that begin before the range ends, one must end after the range begins.
        let end = u128::from(start) + u128::from(length);
        let mut found = Farthest::default();
        let mut at = self.root.as_deref();
        while let Some(node) = at {
            step();
            at = if u128::from(node.key.0) < end {
                found = found.and(farthest(&node.left)).with(node.reach);
                node.right.as_deref()
            } else {
                node.left.as_deref()
            };
        }
        found.beyond(start, except)
    }
}

fn height(link: &Link) -> u8 {
    link.as_ref().map_or(0, |node| node.height)
}

fn farthest(link: &Link) -> Farthest {
    link.as_ref().map_or(Farthest::default(), |node| node.farthest)
}

impl Node {
    /// Updates the height and the farthest ends after a change of the subtrees.
    fn update(&mut self) {
        step();
        self.height = 1 + height(&self.left).max(height(&self.right));
        self.farthest = farthest(&self.left).with(self.reach).and(farthest(&self.right));
    }
}

fn insert(link: Link, key: Key, reach: Reach) -> Box<Node> {
    let Some(mut node) = link else {
        let mut node =
            Box::new(Node { key, reach, farthest: Farthest::default(), height: 1, left: None, right: None });
        node.update();
        return node;
    };
    let side = if key < node.key { &mut node.left } else { &mut node.right };
    *side = Some(insert(side.take(), key, reach));
    balance(node)
}

fn remove(link: Link, key: Key) -> Link {
    let mut node = link?;
    match key.cmp(&node.key) {
        Ordering::Less => node.left = remove(node.left.take(), key),
        Ordering::Greater => node.right = remove(node.right.take(), key),
        Ordering::Equal => {
            let Some(right) = node.right.take() else { return node.left.take() };
            let (rest, mut least) = take_least(right);
            least.left = node.left.take();
            least.right = rest;
            node = least;
        }
    }
    Some(balance(node))
}

/// Splits off the node with the least key. Returns the rest and that node.
fn take_least(mut node: Box<Node>) -> (Link, Box<Node>) {
    match node.left.take() {
        None => (node.right.take(), node),
        Some(left) => {
            let (rest, least) = take_least(left);
            node.left = rest;
            (Some(balance(node)), least)
        }
    }
}

/// Rebalances a node: afterwards, the heights of both sides differ by at most one. Before, they may differ by at most two.
fn balance(mut node: Box<Node>) -> Box<Node> {
    if height(&node.left) > height(&node.right) + 1 {
        node.left = node
            .left
            .take()
            .map(|left| if height(&left.right) > height(&left.left) { rotate_left(left) } else { left });
        return rotate_right(node);
    }
    if height(&node.right) > height(&node.left) + 1 {
        node.right = node.right.take().map(|right| {
            if height(&right.left) > height(&right.right) { rotate_right(right) } else { right }
        });
        return rotate_left(node);
    }
    node.update();
    node
}

fn rotate_left(mut node: Box<Node>) -> Box<Node> {
    let Some(mut up) = node.right.take() else { return node };
    node.right = up.left.take();
    node.update();
    up.left = Some(node);
    up.update();
    up
}

fn rotate_right(mut node: Box<Node>) -> Box<Node> {
    let Some(mut up) = node.left.take() else { return node };
    node.left = up.right.take();
    node.update();
    up.right = Some(node);
    up.update();
    up
}

/// Counts steps, for tests of the cost.
#[inline]
fn step() {
    #[cfg(test)]
    counter::STEPS.with(|steps| steps.set(steps.get() + 1));
}

/// Number of nodes that were read or changed on this thread.
#[cfg(test)]
pub(in crate::engine) mod counter {
    use std::cell::Cell;

    thread_local! {
        pub(in crate::engine) static STEPS: Cell<u64> = const { Cell::new(0) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn owner(number: u8) -> FileId {
        FileId { persistent: number.into(), volatile: number.into() }
    }

    /// [MS-FSA] 2.1.4.10, byte by byte.
    fn meet(a: (u64, u64), b: (u64, u64)) -> bool {
        match (a.1, b.1) {
            (0, 0) => false,
            (0, _) => b.0 < a.0 && a.0 < b.0 + b.1,
            (_, 0) => meet(b, a),
            _ => a.0 < b.0 + b.1 && b.0 < a.0 + a.1,
        }
    }

    fn check(link: &Link) -> u8 {
        let Some(node) = link else { return 0 };
        let (left, right) = (check(&node.left), check(&node.right));
        assert!(left.abs_diff(right) <= 1, "balanced");
        assert!(node.left.as_ref().is_none_or(|left| left.key < node.key));
        assert!(node.right.as_ref().is_none_or(|right| node.key < right.key));
        assert_eq!(node.height, 1 + left.max(right));
        node.height
    }

    proptest! {
        #[test]
        fn overlaps_match_a_linear_search(
            actions in prop::collection::vec((0_u8..4, 0_u64..40, 0_u64..12, 0_u8..3), 1..120)
        ) {
            let (mut set, mut list, mut next) = (Intervals::default(), Vec::new(), 0);
            for (action, start, length, of) in actions {
                match action {
                    0 if !list.is_empty() => {
                        let (key, _, _) = list.swap_remove(start as usize % list.len());
                        set.remove(key);
                    }
                    0..=2 => {
                        set.insert((start, next), length, owner(of));
                        list.push(((start, next), length, owner(of)));
                        next += 1;
                    }
                    _ => {}
                }
                check(&set.root);
                for except in [None, Some(owner(0)), Some(owner(1)), Some(owner(9))] {
                    let expected = list.iter().any(|(key, held, of)| {
                        Some(*of) != except && meet((key.0, *held), (start, length))
                    });
                    prop_assert_eq!(set.meets(start, length, except), expected);
                }
            }
        }
    }

    #[test]
    fn the_last_addressable_byte_is_covered() {
        let mut set = Intervals::default();
        set.insert((u64::MAX, 0), 1, owner(1));
        assert!(set.meets(u64::MAX - 1, 2, None) && !set.meets(u64::MAX - 1, 1, None));
        assert!(!set.meets(u64::MAX, 1, Some(owner(1))));
        set.remove((u64::MAX, 0));
        assert!(!set.meets(0, u64::MAX, None));
    }
}
