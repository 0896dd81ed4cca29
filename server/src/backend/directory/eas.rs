//! Extended attributes: the SMB attribute `name` is stored as `user.name` in the file system, as in Samba.
//!
//! `user.forebay.*` and named streams are internal to the server: clients cannot read or set them as attributes. Listings also
//! omit empty values, which SMB cannot distinguish from missing attributes, and names that are not printable ASCII.

use std::ffi::{CStr, CString};

use forebay_smb::fs::Ea;
use forebay_smb::limits::{EA_BYTES_MAX, EAS_PER_FILE_MAX};
use forebay_smb::status::NtStatus;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::{OpenFile, streams};
use crate::backend::errno::status;

const PREFIX: &[u8] = b"user.";
/// The prefix, after [`PREFIX`], of attributes that are internal to the server.
const OWN: &[u8] = b"forebay.";
/// XATTR_NAME_MAX, XATTR_LIST_MAX and XATTR_SIZE_MAX of linux/limits.h.
pub(super) const NAME_BYTES_MAX: usize = 255;
pub(super) const LIST_BYTES_MAX: usize = 65_536;
pub(super) const VALUE_BYTES_MAX: usize = 65_536;
/// Size of the buffer for short lists of names: most files have no attributes or only those of the server.
const SHORT_LIST_BYTES: usize = 1024;

fn ea_status(errno: Errno) -> NtStatus {
    match errno {
        Errno::TOOBIG | Errno::RANGE => NtStatus::EA_TOO_LARGE,
        Errno::OPNOTSUPP | Errno::NOSYS => NtStatus::EAS_NOT_SUPPORTED,
        errno => status(errno),
    }
}

/// Returns the SMB name of a file system attribute; `None` if it is not served over SMB.
fn served(key: &CStr) -> Option<&[u8]> {
    let name = key.to_bytes().strip_prefix(PREFIX)?;
    let printable = |byte: &u8| matches!(byte, b' '..=b'~');
    if streams::is_stream(key) {
        return None;
    }
    (!name.is_empty() && !name.starts_with(OWN) && name.iter().all(printable)).then_some(name)
}

/// Returns the file system's name for an attribute to set.
fn key(name: &[u8]) -> Result<CString, NtStatus> {
    let key = CString::new([PREFIX, name].concat()).map_err(|_| NtStatus::INVALID_EA_NAME)?;
    if name.starts_with(OWN) || streams::is_stream(&key) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if key.count_bytes() > NAME_BYTES_MAX || served(&key).is_none() {
        return Err(NtStatus::INVALID_EA_NAME);
    }
    Ok(key)
}

/// Iterates over the keys in a list written by flistxattr(2).
pub(super) fn keys(list: &[u8]) -> impl Iterator<Item = &CStr> {
    list.split_inclusive(|byte| *byte == 0).filter_map(|key| CStr::from_bytes_with_nul(key).ok())
}

/// Calls `each` with the list of names.
pub(super) fn with_list<T>(
    file: &OpenFile,
    each: impl FnOnce(&[u8]) -> Result<T, NtStatus>,
) -> Result<T, NtStatus> {
    let mut short = [0; SHORT_LIST_BYTES];
    match rustix::fs::flistxattr(&file.fd, &mut short) {
        Ok(length) => return each(&short[..length]),
        Err(Errno::RANGE) => {}
        Err(errno) => return Err(ea_status(errno)),
    }
    let mut list = vec![0; LIST_BYTES_MAX];
    let length = rustix::fs::flistxattr(&file.fd, &mut list[..]).map_err(ea_status)?;
    each(&list[..length])
}

/// The length of a value; 0 if the attribute no longer exists.
fn length(file: &OpenFile, key: &CStr) -> Result<usize, NtStatus> {
    match rustix::fs::fgetxattr_query(&file.fd, key) {
        Err(Errno::NODATA) => Ok(0),
        result => result.map_err(ea_status),
    }
}

/// Returns all attributes, sorted by name: file systems change their order when a value is replaced.
pub(super) fn get(file: &OpenFile) -> Result<Vec<Ea>, NtStatus> {
    if !file.volume.xattrs {
        return Err(NtStatus::EAS_NOT_SUPPORTED);
    }
    let mut eas = with_list(file, |list| {
        let (mut eas, mut bytes) = (Vec::new(), 0);
        let mut value = Vec::new();
        for (key, name) in keys(list).filter_map(|key| Some((key, served(key)?))) {
            value.resize(VALUE_BYTES_MAX, 0);
            let length = match rustix::fs::fgetxattr(&file.fd, key, &mut value[..]) {
                // It was removed, or is empty, which counts as removed.
                Err(Errno::NODATA) | Ok(0) => continue,
                result => result.map_err(ea_status)?,
            };
            bytes += Ea::size(name.len(), length);
            if bytes > EA_BYTES_MAX || eas.len() == EAS_PER_FILE_MAX {
                return Err(NtStatus::EA_TOO_LARGE);
            }
            eas.push(Ea { name: name.to_vec(), value: value[..length].to_vec() });
        }
        Ok(eas)
    })?;
    eas.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(eas)
}

fn size_of(file: &OpenFile, list: &[u8]) -> Result<u32, NtStatus> {
    let mut bytes = 0;
    for (key, name) in keys(list).filter_map(|key| Some((key, served(key)?))).take(EAS_PER_FILE_MAX) {
        let length = length(file, key)?;
        if length > 0 {
            bytes += Ea::size(name.len(), length);
        }
    }
    Ok(u32::try_from(bytes.min(EA_BYTES_MAX)).unwrap_or(u32::MAX))
}

/// Bytes of all attributes.
pub(super) fn size(file: &OpenFile) -> Result<u32, NtStatus> {
    if !file.volume.xattrs { Ok(0) } else { with_list(file, |list| size_of(file, list)) }
}

/// Like [`size`]; `None` if the file has too many attributes for the short list.
pub(super) fn size_cached(file: &OpenFile) -> Option<Result<u32, NtStatus>> {
    if !file.volume.xattrs {
        return Some(Ok(0));
    }
    let mut list = [0; SHORT_LIST_BYTES];
    match rustix::fs::flistxattr(&file.fd, &mut list) {
        Ok(length) => Some(size_of(file, &list[..length])),
        Err(_) => None,
    }
}

/// Sets, replaces or removes attributes in their order.
pub(super) fn set(file: &OpenFile, eas: &[Ea]) -> Result<(), NtStatus> {
    if !file.volume.xattrs {
        return Err(NtStatus::EAS_NOT_SUPPORTED);
    }
    let keys = eas.iter().map(|ea| key(&ea.name)).collect::<Result<Vec<_>, _>>()?;
    if eas.iter().any(|ea| !ea.value.is_empty()) {
        check_limits(file, eas)?;
    }
    for (key, ea) in keys.iter().zip(eas) {
        if ea.value.is_empty() {
            match rustix::fs::fremovexattr(&file.fd, key.as_c_str()) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(ea_status(errno)),
            }
        } else {
            rustix::fs::fsetxattr(&file.fd, key.as_c_str(), &ea.value, XattrFlags::empty())
                .map_err(ea_status)?;
        }
    }
    Ok(())
}

/// Checks that the attributes can still be listed afterwards. If a file already has too many, they can be replaced by smaller
/// ones.
fn check_limits(file: &OpenFile, eas: &[Ea]) -> Result<(), NtStatus> {
    let mut there: Vec<(Vec<u8>, usize)> = with_list(file, |list| {
        let served = keys(list).filter_map(|key| Some((key, served(key)?)));
        served.map(|(key, name)| Ok((name.to_vec(), length(file, key)?))).collect()
    })?;
    let used = |there: &[(Vec<u8>, usize)]| {
        let all = there.iter().filter(|(_, value)| *value > 0);
        all.fold((0, 0), |(count, bytes), (name, value)| (count + 1, bytes + Ea::size(name.len(), *value)))
    };
    let before = used(&there);
    for ea in eas {
        match there.iter_mut().find(|(name, _)| *name == ea.name) {
            Some((_, value)) => *value = ea.value.len(),
            None => there.push((ea.name.clone(), ea.value.len())),
        }
    }
    let after = used(&there);
    let exceeds = |before: usize, after: usize, max: usize| after > max && after > before;
    if exceeds(before.0, after.0, EAS_PER_FILE_MAX) || exceeds(before.1, after.1, EA_BYTES_MAX) {
        return Err(NtStatus::EA_TOO_LARGE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_xattrs_and_other_namespaces_are_not_served() {
        assert_eq!(served(c"user.a"), Some(&b"a"[..]));
        assert_eq!(served(c"user.Forebay.x"), Some(&b"Forebay.x"[..]));
        let others = [c"user.", c"security.selinux", c"trusted.a", c"user.gr\xc3\xbcn"];
        for key in others.into_iter().chain([c"user.forebay.dos", c"user.DosStream.a:$DATA"]) {
            assert_eq!(served(key), None, "{key:?}");
        }
    }

    #[test]
    fn ea_names_are_checked_for_length_and_reserved_prefixes() {
        assert_eq!(key(b"a").as_deref(), Ok(c"user.a"));
        assert!(key(&[b'n'; 250]).is_ok());
        assert_eq!(key(&[b'n'; 251]), Err(NtStatus::INVALID_EA_NAME));
        assert_eq!(key(b"a\0b"), Err(NtStatus::INVALID_EA_NAME));
        assert_eq!(key(b""), Err(NtStatus::INVALID_EA_NAME));
        assert_eq!(key(b"forebay.dos"), Err(NtStatus::ACCESS_DENIED));
        assert_eq!(key(b"DosStream.a:$DATA"), Err(NtStatus::ACCESS_DENIED));
    }

    #[test]
    fn xattr_list_is_split_into_names() {
        let list: Vec<_> = keys(b"user.a\0user.b\0").collect();
        assert_eq!(list, [c"user.a", c"user.b"]);
        assert_eq!(keys(b"").count(), 0);
    }
}
