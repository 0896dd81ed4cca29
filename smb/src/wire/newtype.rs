//! Integers of the wire as types. Unknown values are kept, never rejected: the engine interprets them.

/// An enumeration that keeps unknown values.
macro_rules! open_enum {
    ($(#[$meta:meta])* $name:ident($int:ty) { $($variant:ident = $value:expr),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $int);

        #[allow(missing_docs, reason = "the names are the specification's")]
        impl $name {
            $(pub const $variant: Self = Self($value);)*
        }

        impl ::std::fmt::Debug for $name {
            #[allow(unreachable_patterns, reason = "some numbers have two names")]
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                match self.0 {
                    $(value if value == $value => f.write_str(stringify!($variant)),)*
                    other => write!(f, concat!(stringify!($name), "({:#x})"), other),
                }
            }
        }

        impl $crate::wire::cursor::Field for $name {
            fn read(r: &mut $crate::wire::cursor::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                r.get().map(Self)
            }
            fn write(&self, out: &mut Vec<u8>) {
                self.0.write(out);
            }
        }
    };
}

/// A set of bits that keeps unknown ones.
macro_rules! open_flags {
    ($(#[$meta:meta])* $name:ident($int:ty) { $($bit:ident = $value:expr),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $int);

        #[allow(missing_docs, reason = "the names are the specification's")]
        impl $name {
            $(pub const $bit: Self = Self($value);)*
        }

        #[allow(dead_code, reason = "every set has the same operations")]
        impl $name {
            /// No bit.
            #[must_use]
            pub const fn empty() -> Self {
                Self(0)
            }

            /// Whether no bit is set.
            #[must_use]
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// Whether all bits of `other` are set.
            #[must_use]
            pub const fn contains(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// Whether any bit of `other` is set.
            #[must_use]
            pub const fn intersects(self, other: Self) -> bool {
                self.0 & other.0 != 0
            }

            /// These bits without those of `other`.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// Union of both sets; `|` in constants.
            #[must_use]
            pub const fn union(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// Sets the bits of `other`.
            pub const fn insert(&mut self, other: Self) {
                self.0 |= other.0;
            }

            /// Clears the bits of `other`.
            pub const fn remove(&mut self, other: Self) {
                self.0 &= !other.0;
            }
        }

        impl ::std::ops::BitOr for $name {
            type Output = Self;
            fn bitor(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }
        }

        impl ::std::ops::BitOrAssign for $name {
            fn bitor_assign(&mut self, other: Self) {
                self.0 |= other.0;
            }
        }

        impl ::std::ops::BitAnd for $name {
            type Output = Self;
            fn bitand(self, other: Self) -> Self {
                Self(self.0 & other.0)
            }
        }

        impl ::std::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                let mut rest = self.0;
                let mut first = true;
                write!(f, concat!(stringify!($name), "("))?;
                $(
                    if rest & $value == $value {
                        if !first { f.write_str(" | ")?; }
                        f.write_str(stringify!($bit))?;
                        rest &= !$value;
                        first = false;
                    }
                )*
                if rest != 0 || first {
                    if !first { f.write_str(" | ")?; }
                    write!(f, "{rest:#x}")?;
                }
                f.write_str(")")
            }
        }

        impl $crate::wire::cursor::Field for $name {
            fn read(r: &mut $crate::wire::cursor::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                r.get().map(Self)
            }
            fn write(&self, out: &mut Vec<u8>) {
                self.0.write(out);
            }
        }
    };
}

/// A structure of fixed size: fields in wire order, `_: N` for N reserved bytes (written as zeros).
macro_rules! layout {
    ($(#[$meta:meta])* $name:ident[$len:expr] { $($body:tt)* }) => {
        layout!(@split [$(#[$meta])*] $name [$len] {} {} {} $($body)*);
    };
    // reserved bytes
    (@split $metas:tt $name:ident $len:tt {$($def:tt)*} {$($read:tt)*} {$($write:tt)*} _: $pad:literal, $($rest:tt)*) => {
        layout!(@split $metas $name $len {$($def)*} {$($read)* (pad $pad)} {$($write)* (pad $pad)} $($rest)*);
    };
    (@split $metas:tt $name:ident $len:tt {$($def:tt)*} {$($read:tt)*} {$($write:tt)*}
        $(#[$fmeta:meta])* $field:ident: $ty:ty, $($rest:tt)*) => {
        layout!(@split $metas $name $len
            {$($def)* $(#[$fmeta])* pub $field: $ty,} {$($read)* (get $field)} {$($write)* (put $field)} $($rest)*);
    };
    (@split [$(#[$meta:meta])*] $name:ident [$len:expr] {$($def:tt)*} {$(($rk:ident $rv:tt))*} {$(($wk:ident $wv:tt))*}) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        #[allow(missing_docs, reason = "the names are the specification's")]
        pub struct $name { $($def)* }

        impl $name {
            /// Bytes on the wire.
            pub const LEN: usize = $len;

            /// Reads the structure from the start of `bytes`; bytes after it are ignored.
            pub fn parse(bytes: &[u8]) -> Result<Self, $crate::wire::Malformed> {
                $crate::wire::cursor::Reader::new(bytes, stringify!($name)).get()
            }

            /// Appends the structure.
            pub fn encode(&self, out: &mut Vec<u8>) {
                $crate::wire::cursor::Field::write(self, out);
            }
        }

        impl $crate::wire::cursor::Field for $name {
            fn read(r: &mut $crate::wire::cursor::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                $(layout!(@$rk r $rv);)*
                Ok(layout!(@build $name {} $(($rk $rv))*))
            }
            fn write(&self, out: &mut Vec<u8>) {
                let start = out.len();
                $(layout!(@$wk self out $wv);)*
                debug_assert_eq!(out.len() - start, Self::LEN);
            }
        }
    };
    (@pad $r:ident $n:tt) => { $r.skip($n)?; };
    (@get $r:ident $field:tt) => { let $field = $r.get()?; };
    (@pad $s:ident $out:ident $n:tt) => { $crate::wire::cursor::zeros($out, $n); };
    (@put $s:ident $out:ident $field:tt) => { $crate::wire::cursor::Field::write(&$s.$field, $out); };
    (@build $name:ident {$($f:ident)*}) => { $name { $($f),* } };
    (@build $name:ident {$($f:ident)*} (pad $n:tt) $($rest:tt)*) => { layout!(@build $name {$($f)*} $($rest)*) };
    (@build $name:ident {$($f:ident)*} (get $field:ident) $($rest:tt)*) => { layout!(@build $name {$($f)* $field} $($rest)*) };
}

pub(crate) use {layout, open_enum, open_flags};
