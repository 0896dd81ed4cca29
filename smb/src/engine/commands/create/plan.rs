//! A CREATE request, checked before its file is opened ([MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::descriptor::{Kept, Owner};
use crate::engine::access::{self, DATA_CHANGING};
use crate::engine::app_instances::AppInstance;
use crate::engine::commands::{eas, security};
use crate::engine::creations::Creation;
use crate::engine::durable::DurableRequest;
use crate::engine::file::leases::LeaseKey;
use crate::engine::file::opener::RequestedCaching;
use crate::engine::names::{self, Name, Stream};
use crate::engine::request::step::Ctx;
use crate::engine::session::Share;
use crate::engine::volume::Volume;
use crate::fs::{Ea, ObjectKind, OpenMode, OpenRequest, Opened, Ownership, RelPath, Stat, StreamName};
use crate::short_name;
use crate::status::NtStatus;
use crate::wire::create::{CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel, Request};
use crate::wire::create_context::{Lease, LeaseFlags, LeaseV2, RequestContext};
use crate::wire::fscc::posix::PosixFileType;
use crate::wire::{AccessMask, Capabilities, Dialect, FileAttributes, ShareAccess};

/// Options that servers interpret or ignore ([MS-SMB2] 2.2.13).
const OPTIONS_KNOWN: CreateOptions = CreateOptions(0x00ff_ffff);
/// Options that no file system here supports ([MS-SMB2] 3.3.5.9).
const OPTIONS_UNSUPPORTED: CreateOptions = CreateOptions::CREATE_TREE_CONNECTION
    .union(CreateOptions::OPEN_BY_FILE_ID)
    .union(CreateOptions::RESERVE_OPFILTER);
/// Attributes that a CREATE may contain ([MS-FSCC] 2.6, [MS-FSA] 2.1.5.1).
const ATTRIBUTES_KNOWN: FileAttributes = FileAttributes(0x0000_7fb7);
/// Attributes that a CREATE or SET_INFO sets; the others describe what the file is.
pub(in crate::engine::commands) const ATTRIBUTES_SETTABLE: FileAttributes = FileAttributes::READONLY
    .union(FileAttributes::HIDDEN)
    .union(FileAttributes::SYSTEM)
    .union(FileAttributes::ARCHIVE)
    .union(FileAttributes::TEMPORARY)
    .union(FileAttributes::OFFLINE)
    .union(FileAttributes::NOT_CONTENT_INDEXED);

/// What Linux's client requests for the times and the owner of a file. It resolves symbolic links itself, and opens the link
/// without FILE_OPEN_REPARSE_POINT for these.
const OF_ATTRIBUTES: AccessMask = AccessMask(
    AccessMask::FILE_WRITE_ATTRIBUTES.0
        | AccessMask::READ_CONTROL.0
        | AccessMask::WRITE_DAC.0
        | AccessMask::WRITE_OWNER.0
        | AccessMask::SYNCHRONIZE.0,
);

/// A valid CREATE, before its file is opened.
pub(super) struct Plan {
    pub(super) volume: Arc<Volume>,
    pub(super) tree_id: u32,
    /// TreeConnect.MaximalAccess.
    pub(super) maximal: AccessMask,
    pub(super) path: RelPath,
    /// The named stream to open, if any.
    pub(super) stream: Option<StreamName>,
    pub(super) desired: AccessMask,
    pub(super) share: ShareAccess,
    pub(super) disposition: CreateDisposition,
    pub(super) options: CreateOptions,
    pub(super) attributes: FileAttributes,
    pub(super) allocation_size: u64,
    /// Extended attributes for a file that is created or overwritten.
    pub(super) eas: Vec<Ea>,
    pub(super) query_maximal_access: bool,
    pub(super) query_on_disk_id: bool,
    /// Whether it has the create context of the POSIX extensions.
    pub(super) posix: bool,
    /// Owner and permission bits of a new file.
    pub(super) ownership: Option<Ownership>,
    /// The part of the requested security descriptor that a new file keeps.
    pub(super) descriptor: Option<Box<Kept>>,
    /// RequestedOplockLevel.
    pub(super) oplock_level: OplockLevel,
    /// The requested oplock, or the requested lease if the level is LEASE.
    pub(super) ask: RequestedCaching,
    /// Whether a directory may be leased as `ask` requests.
    pub(super) leases_directories: bool,
    /// Open.ParentOplockKey
    pub(super) parent_lease_key: Option<LeaseKey>,
    /// Whether it has not waited for a break yet.
    pub(super) first: bool,
    pub(super) durable: Option<DurableRequest>,
    /// Present if the CREATE can be replayed.
    pub(super) creation: Option<Creation>,
    /// The application instance, if it can move to another client.
    pub(super) app_instance: Option<AppInstance>,
}

/// Performs all checks that do not require the file.
pub(super) fn plan(ctx: &mut Ctx<'_>, request: &Request<'_>) -> Result<Plan, NtStatus> {
    let tree = ctx.tree();
    let Share::Volume(volume) = &tree.share else {
        // Pipes are opened elsewhere.
        return Err(NtStatus::OBJECT_NAME_NOT_FOUND);
    };
    if volume.removed.load(Ordering::Acquire) {
        return Err(NtStatus::NETWORK_NAME_DELETED);
    }
    let volume = &as_of(volume, request)?;
    if request.impersonation_level > ImpersonationLevel::DELEGATE {
        return Err(NtStatus::BAD_IMPERSONATION_LEVEL);
    }
    let (options, disposition) = (request.create_options, request.create_disposition);
    let maximal = AccessMask(if volume.read_only { tree.access & access::READ_ONLY } else { tree.access });
    let desired = access::desired(request.desired_access, maximal)?;
    check_options(request)?;
    let posix = posix_mode(ctx, request);
    let disposition = if posix.is_some() { without_overwriting(disposition) } else { disposition };
    let name = if posix.is_some() {
        names::parse_posix(&request.name)?
    } else if request.name.starts_with('\\') {
        return Err(NtStatus::INVALID_PARAMETER);
    } else {
        names::parse(&request.name)?
    };
    if name.directory && options.contains(CreateOptions::NON_DIRECTORY_FILE) {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    let Name { path, directory, stream } = name;
    if stream.is_some() && options.contains(CreateOptions::DIRECTORY_FILE) {
        // No stream is a directory.
        return Err(NtStatus::NOT_A_DIRECTORY);
    }
    let mut options = options;
    if directory {
        options.insert(CreateOptions::DIRECTORY_FILE);
    }
    let stream = match stream {
        Some(Stream::Named(_)) if !volume.extended_attributes => return Err(NtStatus::OBJECT_NAME_INVALID),
        Some(Stream::Named(stream)) => Some(stream),
        Some(Stream::Default) => {
            // A directory has no data stream.
            options.insert(CreateOptions::NON_DIRECTORY_FILE);
            None
        }
        None => None,
    };
    if options.contains(CreateOptions::DELETE_ON_CLOSE) {
        // [MS-SMB2] 3.3.5.9
        if !desired.intersects(AccessMask::DELETE | AccessMask::MAXIMUM_ALLOWED) || volume.read_only {
            return Err(NtStatus::ACCESS_DENIED);
        }
        if path.is_root() || request.file_attributes.contains(FileAttributes::READONLY) {
            return Err(NtStatus::CANNOT_DELETE);
        }
    }
    if volume.read_only && !matches!(disposition, CreateDisposition::OPEN | CreateDisposition::OPEN_IF) {
        return Err(NtStatus::MEDIA_WRITE_PROTECTED);
    }
    let mut plan = Plan {
        volume: Arc::clone(volume),
        tree_id: tree.id,
        maximal,
        path,
        stream,
        desired,
        share: request.share_access,
        disposition,
        options,
        // The permission bits replace the DOS attributes.
        attributes: match posix {
            Some(_) => FileAttributes::empty(),
            None => request.file_attributes & ATTRIBUTES_SETTABLE,
        },
        allocation_size: 0,
        eas: Vec::new(),
        query_maximal_access: false,
        query_on_disk_id: false,
        posix: posix.is_some(),
        ownership: posix.map(|mode| Ownership { mode, ..Ownership::default() }),
        descriptor: None,
        oplock_level: OplockLevel::NONE,
        ask: RequestedCaching::Nothing,
        leases_directories: false,
        parent_lease_key: None,
        first: true,
        durable: None,
        creation: None,
        app_instance: None,
    };
    if ctx.server.config.caching {
        plan.oplock_level = request.requested_oplock_level;
        plan.ask = RequestedCaching::oplock(plan.oplock_level);
    }
    for context in &request.contexts {
        plan.context(ctx, context)?;
    }
    // Opens of a snapshot do not move with an application to another client.
    if !plan.volume.is_snapshot {
        plan.app_instance = AppInstance::of(&request.contexts, ctx.core.dialect(), ctx.core.client_guid());
    }
    Ok(plan)
}

/// The live volume, or its snapshot of the time that the CREATE names ([MS-SMB2] 2.2.13.2.7).
fn as_of(volume: &Arc<Volume>, request: &Request<'_>) -> Result<Arc<Volume>, NtStatus> {
    let mut times = request.contexts.iter().filter_map(|context| match context {
        RequestContext::TimewarpToken(time) => Some(*time),
        _ => None,
    });
    match times.next() {
        None => Ok(Arc::clone(volume)),
        Some(time) => volume.snapshots.find(time.0).ok_or(NtStatus::OBJECT_NAME_NOT_FOUND),
    }
}

/// Whether a CREATE has the create context of the POSIX extensions, and the permission bits in it. The Linux client adds
/// the file type to them, and sends all ones if it has no permission bits.
fn posix_mode(ctx: &Ctx<'_>, request: &Request<'_>) -> Option<Option<u32>> {
    let mode = request.contexts.iter().find_map(|context| match context {
        RequestContext::Posix { mode } => Some(*mode),
        _ => None,
    });
    mode.filter(|_| ctx.core.has_posix()).map(PosixFileType::permissions_of_new)
}

/// A client with the POSIX extensions enforces permissions itself, and Linux's opens a file that it does not know yet before it
/// checks them: overwriting would empty a file of another user although the program then gets EACCES. After the check, Linux
/// sets the size itself. So the contents stay, and the response says FILE_OPENED.
fn without_overwriting(disposition: CreateDisposition) -> CreateDisposition {
    match disposition {
        CreateDisposition::OVERWRITE => CreateDisposition::OPEN,
        CreateDisposition::OVERWRITE_IF => CreateDisposition::OPEN_IF,
        other => other,
    }
}

/// The lease that a lease context requests, if the client may have leases of that version.
fn asked_lease(ctx: &Ctx<'_>, lease: &Lease) -> RequestedCaching {
    let Some(negotiated) = &ctx.core.negotiated else { return RequestedCaching::Nothing };
    let known = match lease.v2 {
        Some(_) => ctx.core.is_smb3(),
        None => negotiated.dialect != Dialect::SMB2_0_2,
    };
    // A key of zeros does not identify a lease.
    if !known || lease.lease_key == [0; 16] {
        return RequestedCaching::Nothing;
    }
    RequestedCaching::Lease { client: negotiated.client_guid, lease: *lease }
}

/// [MS-SMB2] 3.3.5.9, [MS-FSA] 2.1.5.1
fn check_options(request: &Request<'_>) -> Result<(), NtStatus> {
    let (options, disposition) = (request.create_options, request.create_disposition);
    if disposition > CreateDisposition::OVERWRITE_IF
        || request.share_access.0 & !0x7 != 0
        || !options.without(OPTIONS_KNOWN).is_empty()
        || !request.file_attributes.without(ATTRIBUTES_KNOWN).is_empty()
    {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if options.intersects(OPTIONS_UNSUPPORTED) {
        return Err(NtStatus::NOT_SUPPORTED);
    }
    if request.file_attributes.contains(FileAttributes::ENCRYPTED) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if options.contains(CreateOptions::DIRECTORY_FILE)
        && (options.contains(CreateOptions::NON_DIRECTORY_FILE)
            || request.file_attributes.contains(FileAttributes::TEMPORARY)
            || overwrites(disposition))
    {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    Ok(())
}

pub(super) fn overwrites(disposition: CreateDisposition) -> bool {
    matches!(
        disposition,
        CreateDisposition::SUPERSEDE | CreateDisposition::OVERWRITE | CreateDisposition::OVERWRITE_IF
    )
}

impl Plan {
    fn context(&mut self, ctx: &Ctx<'_>, context: &RequestContext<'_>) -> Result<(), NtStatus> {
        match context {
            RequestContext::EaBuffer(list) if !list.is_empty() && !self.volume.extended_attributes => {
                Err(NtStatus::EAS_NOT_SUPPORTED)
            }
            RequestContext::EaBuffer(list) => {
                self.eas = eas::to_set(list)?;
                Ok(())
            }
            RequestContext::AllocationSize(size) => {
                self.allocation_size = *size;
                Ok(())
            }
            RequestContext::QueryMaximalAccess(_) => {
                self.query_maximal_access = true;
                Ok(())
            }
            RequestContext::QueryOnDiskId => {
                self.query_on_disk_id = true;
                Ok(())
            }
            // [MS-SMB2] 2.2.13.2: names have at least four bytes.
            RequestContext::Unknown { name, .. } if name.len() < 4 => Err(NtStatus::INVALID_PARAMETER),
            // Without caching, there is nothing to reconnect to.
            RequestContext::DurableHandleReconnect(_) | RequestContext::DurableHandleReconnectV2 { .. } => {
                Err(NtStatus::OBJECT_NAME_NOT_FOUND)
            }
            // [MS-SMB2] 3.3.5.9.8, 3.3.5.9.11
            RequestContext::Lease(lease) if self.oplock_level == OplockLevel::LEASE => {
                self.ask = asked_lease(ctx, lease);
                if let (RequestedCaching::Lease { .. }, Some(v2)) = (&self.ask, lease.v2) {
                    self.lease_v2(ctx, lease, v2);
                }
                Ok(())
            }
            RequestContext::SdBuffer(descriptor) => {
                let (given, kept) = security::of_new_file(descriptor);
                self.descriptor = kept.filter(|_| self.volume.extended_attributes);
                if given != Ownership::default() {
                    let ownership = self.ownership.get_or_insert_default();
                    ownership.uid = given.uid;
                    ownership.gid = given.gid;
                    // The POSIX context has the bits that the program requested. Along with it, the Linux client sends an
                    // ACL with all of them set.
                    ownership.mode = ownership.mode.or(given.mode);
                }
                Ok(())
            }
            // Durable handles and application instances are handled elsewhere; all other contexts are ignored.
            _ => Ok(()),
        }
    }

    /// [MS-SMB2] 3.3.5.9.11
    fn lease_v2(&mut self, ctx: &Ctx<'_>, lease: &Lease, v2: LeaseV2) {
        if lease.lease_flags.contains(LeaseFlags::PARENT_LEASE_KEY_SET) {
            self.parent_lease_key = Some(v2.parent_lease_key);
        }
        // Connection.SupportsDirectoryLeasing
        let negotiated = ctx.core.negotiated.as_ref();
        self.leases_directories =
            negotiated.is_some_and(|n| n.capabilities.contains(Capabilities::DIRECTORY_LEASING));
    }

    pub(super) fn open_request(&self) -> OpenRequest {
        let mode = match self.disposition {
            // Nothing is created on a read-only volume.
            _ if self.volume.read_only => OpenMode::Existing,
            CreateDisposition::OPEN | CreateDisposition::OVERWRITE => OpenMode::Existing,
            CreateDisposition::CREATE => OpenMode::New,
            _ => OpenMode::Either,
        };
        let kind = if self.options.contains(CreateOptions::DIRECTORY_FILE) {
            ObjectKind::Directory
        } else if self.options.contains(CreateOptions::NON_DIRECTORY_FILE) {
            ObjectKind::File
        } else {
            ObjectKind::Any
        };
        let desired = if self.desired.contains(AccessMask::MAXIMUM_ALLOWED) {
            self.desired | self.maximal
        } else {
            self.desired
        };
        OpenRequest {
            path: self.path.clone(),
            mode,
            kind,
            read: desired.intersects(AccessMask::FILE_READ_DATA | AccessMask::FILE_EXECUTE),
            write: desired.intersects(DATA_CHANGING) || overwrites(self.disposition),
            write_through: self.options.contains(CreateOptions::WRITE_THROUGH),
            attributes: self.attributes.0,
            allocation_size: self.allocation_size,
            ownership: self.ownership,
            stream: self.stream.clone().map(Box::new),
            descriptor: self.descriptor.clone(),
            checked: !self.posix,
        }
    }

    /// Whether the client requests the target of a reparse point, not the reparse point itself ([MS-FSA] 2.1.5.1).
    pub(super) fn stops_at(&self, opened: &Opened) -> bool {
        let for_attributes =
            self.posix && self.disposition == CreateDisposition::OPEN && OF_ATTRIBUTES.contains(self.desired);
        opened.stat.reparse.is_some()
            && !self.options.contains(CreateOptions::OPEN_REPARSE_POINT)
            && !for_attributes
    }

    /// Whether the path may contain short names. For clients with the POSIX extensions there are none.
    pub(super) fn may_have_short_names(&self) -> bool {
        !self.posix && self.path.as_str().split('/').any(short_name::may_be_made)
    }

    /// Whether an existing file loses its contents.
    pub(super) fn overwrites(&self, opened: &Opened) -> bool {
        !opened.created && overwrites(self.disposition)
    }

    /// Whether the client requested caching.
    pub(super) fn caches(&self) -> bool {
        !matches!(self.ask, RequestedCaching::Nothing)
    }

    /// The rights that the share and the security descriptors permit. For clients with the POSIX extensions, permission
    /// bits count instead; these clients enforce them themselves.
    pub(super) fn permitted(&self, opened: &Opened) -> AccessMask {
        match &opened.descriptors {
            Some(descriptors) if !self.posix => {
                let Stat { uid, gid, .. } = opened.stat;
                self.maximal & descriptors.rights(Owner { uid, gid })
            }
            _ => self.maximal,
        }
    }

    /// The access that the CREATE needs on an existing file besides the requested access ([MS-FSA] 2.1.5.1.2.1).
    fn needed(&self) -> AccessMask {
        let mut needed = AccessMask::empty();
        if overwrites(self.disposition) {
            needed |= AccessMask::FILE_WRITE_DATA;
        }
        if self.disposition == CreateDisposition::SUPERSEDE {
            needed |= AccessMask::DELETE;
        }
        if self.options.contains(CreateOptions::DELETE_ON_CLOSE) {
            needed |= AccessMask::DELETE;
        }
        needed
    }

    /// Checks the request against the opened file, and returns the granted access.
    pub(super) fn granted(&self, opened: &Opened) -> Result<AccessMask, NtStatus> {
        let attributes = FileAttributes(opened.stat.attributes);
        // The security of the file protects a newly created stream.
        let made_file = opened.made_file();
        let mut maximal = self.maximal;
        if opened.descriptors.is_some() && !made_file {
            maximal = self.permitted(opened);
            let asked = self.desired.without(AccessMask::MAXIMUM_ALLOWED) | self.needed();
            if !asked.without(maximal).is_empty() {
                return Err(NtStatus::ACCESS_DENIED);
            }
        }
        let access = access::grant(self.desired, maximal, attributes, made_file)?;
        if opened.created {
            return Ok(access);
        }
        let delete = self.options.contains(CreateOptions::DELETE_ON_CLOSE);
        if delete && (attributes.contains(FileAttributes::READONLY)) {
            return Err(NtStatus::CANNOT_DELETE);
        }
        if overwrites(self.disposition) {
            if opened.stat.directory {
                return Err(NtStatus::INVALID_PARAMETER);
            }
            // [MS-FSA] 2.1.5.1.2.3: hidden and system files can only be replaced by such files. A stream has no attributes.
            let kept = match self.stream {
                None => FileAttributes::HIDDEN | FileAttributes::SYSTEM,
                Some(_) => FileAttributes::empty(),
            };
            if attributes.contains(FileAttributes::READONLY)
                || !(attributes & kept).without(self.attributes).is_empty()
            {
                return Err(NtStatus::ACCESS_DENIED);
            }
        }
        Ok(access)
    }
}
