//! One end of a connection: its queue pair, and all memory that the device can access for it.
//!
//! Messages are received in slots of one registered block. Data for sends and RDMA transfers are in registered buffers of a
//! pool. The endpoint holds them until the last work request that uses them is completed, or the queue pair is destroyed.

use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdma_sys::{
    bind_mw_t, bind_mw_tso_union_t, ibv_access_flags, ibv_cq, ibv_mw_bind_info, ibv_poll_cq, ibv_post_recv,
    ibv_post_send, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_type, ibv_recv_wr, ibv_req_notify_cq, ibv_send_flags,
    ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode,
    imm_data_invalidated_rkey_union_t, rdma_conn_param, rdma_t, wr_t,
};
use rustix::io::Errno;

use crate::buffers::{Buffer, PAGE};
use crate::cm::{CmKey, EventChannel, Id, Incoming, Outgoing};
use crate::device::{Device, Notifier, Region};
use crate::exposed::Window;
use crate::transfers::Transfers;
use crate::{check, last_errno};

/// Capacities of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Slots for received messages.
    pub receives: u16,
    /// Bytes of each slot.
    pub receive_bytes: u32,
    /// Sends in flight.
    pub sends: u16,
    /// RDMA READs and WRITEs, and bindings, in flight.
    pub transfers: u16,
}

/// Maximum number of pieces of held buffers in one message.
pub const PIECES_MAX: usize = 5;
/// Maximum header length, in bytes, for [`Endpoint::send`].
const HEADER_BYTES: usize = 32;
/// Completions polled at a time.
const POLLED: usize = 32;
/// Bit in the id of a work request: a receive, into the slot given by the other bits.
const RECEIVE: u64 = 1 << 63;

/// A piece of a held buffer.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Number returned by [`Endpoint::hold`].
    pub buffer: u32,
    /// Offset in bytes from the given origin.
    pub start: u32,
    /// Length in bytes.
    pub length: u32,
}

/// The peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    /// Its address in the peer's memory.
    pub address: u64,
    /// The token that grants access.
    pub token: u32,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completed {
    /// A slot contains a received message.
    Received {
        /// Slot number.
        slot: u16,
        /// Length in bytes.
        length: u32,
        /// Our token that the peer had invalidated. Soft-RoCE reports it to the kernel only: it passes the kernel's flags to
        /// processes, which use different values.
        invalidated: Option<u32>,
    },
    /// A message was sent; with the mark passed to [`Endpoint::send`].
    Sent(Option<u64>),
    /// Bytes written by RDMA WRITE.
    Written(u32),
    /// A window is bound to the token returned by [`Endpoint::bind`].
    Bound,
    /// Bytes read by RDMA READ; with the mark passed to [`Endpoint::read`].
    Fetched(Option<u64>, u32),
    /// The connection is broken.
    Failed(Failure),
}

/// Why a connection is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The connection was ended with work in flight: every connection with a posted receive ends this way.
    Flushed,
    /// A reason for the log.
    Broken(&'static str),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flushed => "the connection was ended",
            Self::Broken(reason) => reason,
        })
    }
}

struct Held {
    buffer: Buffer,
    origin: isize,
    /// Work requests that use it.
    posted: u32,
    /// To be released when the last of them completes.
    released: bool,
}

enum Work {
    Send { slot: u16, pieces: [u32; PIECES_MAX], count: usize, mark: Option<u64> },
    Bind,
    Write { buffer: u32, length: u32 },
    Read { buffer: u32, length: u32, mark: Option<u64> },
}

/// One end of a connection.
pub struct Endpoint {
    id: Id,
    device: Arc<Device>,
    notifier: Arc<Notifier>,
    queue: NonNull<ibv_cq>,
    sizes: Sizes,
    depths: (u8, u8),
    region: Region,
    memory: Box<[u8]>,
    /// Where the slots begin in `memory`.
    begin: usize,
    /// Slots with a posted receive.
    posted: Vec<bool>,
    /// Free header slots.
    headers: Vec<u16>,
    transfers: Transfers,
    work: Vec<Option<Work>>,
    work_free: Vec<u32>,
    held: Vec<Option<Held>>,
    held_free: Vec<u32>,
}

// SAFETY: verbs can be called from any thread, and no part of an endpoint is shared.
unsafe impl Send for Endpoint {}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({:?} on {})", self.id.key(), self.device.name())
    }
}

impl Endpoint {
    /// The end of a connection that a peer has requested, not accepted yet. Its events arrive at `channel`; `notifier`
    /// signals its completions under the name `context`.
    ///
    /// # Errors
    /// Errors of the device: out of queue pairs, or of memory that may be locked.
    pub fn new(
        incoming: Incoming,
        channel: &Arc<EventChannel>,
        notifier: &Arc<Notifier>,
        context: u64,
        sizes: Sizes,
    ) -> Result<Self, Errno> {
        let device = incoming.device()?;
        let depths = incoming.depths(&device);
        let mut id = incoming.id;
        id.migrate(channel)?;
        Self::made(id, device, depths, notifier, context, sizes)
    }

    /// The end of a connection to be requested, after both resolution steps. Completions as with [`Endpoint::new`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn connecting(
        outgoing: Outgoing,
        notifier: &Arc<Notifier>,
        context: u64,
        sizes: Sizes,
    ) -> Result<Self, Errno> {
        let device = outgoing.device()?;
        // The connecting side exposes memory; it accesses none of the peer's.
        let depths = (0, device.reads_max);
        Self::made(outgoing.id, device, depths, notifier, context, sizes)
    }

    fn made(
        id: Id,
        device: Arc<Device>,
        depths: (u8, u8),
        notifier: &Arc<Notifier>,
        context: u64,
        sizes: Sizes,
    ) -> Result<Self, Errno> {
        let slots = usize::from(sizes.receives) * sizes.receive_bytes as usize;
        let mut memory = vec![0; slots + usize::from(sizes.sends) * HEADER_BYTES + PAGE].into_boxed_slice();
        let begin = memory.as_ptr().align_offset(PAGE);
        let region = device.register(&mut memory)?;
        let entries = i32::from(sizes.receives) + i32::from(sizes.sends) + i32::from(sizes.transfers) + 8;
        // SAFETY: context and channel live; the name is only a number.
        let queue = unsafe {
            (device.library().ibv_create_cq)(
                device.context(),
                entries,
                context as *mut c_void,
                notifier.channel(),
                notifier.vector(),
            )
        };
        let queue = NonNull::new(queue).ok_or_else(last_errno)?;
        let works = usize::from(sizes.sends) + usize::from(sizes.transfers);
        let endpoint = Self {
            id,
            notifier: Arc::clone(notifier),
            queue,
            sizes,
            depths,
            region,
            memory,
            begin,
            posted: vec![false; sizes.receives.into()],
            headers: (0..sizes.sends).collect(),
            transfers: Transfers::new(sizes.transfers, depths.0),
            work: (0..works).map(|_| None).collect(),
            work_free: (0..works as u32).collect(),
            held: Vec::new(),
            held_free: Vec::new(),
            device,
        };
        debug_assert_eq!(endpoint.notifier.device().key(), endpoint.device.key());
        endpoint.make_queue_pair()?;
        Ok(endpoint)
    }

    fn make_queue_pair(&self) -> Result<(), Errno> {
        let mut attributes = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.queue.as_ptr(),
            recv_cq: self.queue.as_ptr(),
            srq: ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: u32::from(self.sizes.sends) + u32::from(self.sizes.transfers),
                max_recv_wr: self.sizes.receives.into(),
                max_send_sge: PIECES_MAX as u32 + 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: queue and domain live; the queue pair belongs to the identifier from here on.
        unsafe {
            check((self.device.library().rdma_create_qp)(
                self.id.raw(),
                self.device.domain(),
                &raw mut attributes,
            ))?;
            // Armed before anything can complete.
            check(ibv_req_notify_cq(self.queue.as_ptr(), 0))
        }
    }

    /// The key under which events refer to it.
    #[must_use]
    pub fn key(&self) -> CmKey {
        self.id.key()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Accepts the peer. Post the receives first.
    ///
    /// # Errors
    /// Errors of the connection manager.
    pub fn accept(&mut self) -> Result<(), Errno> {
        // [MS-SMBD] 3.1.4.1: credits ensure that a receive is posted; a peer that violates this is disconnected.
        let mut parameters = self.parameters(0);
        // SAFETY: the identifier has a queue pair.
        check(unsafe { (self.device.library().rdma_accept)(self.id.raw(), &raw mut parameters) })
    }

    /// Requests the connection from the peer. `receiver_not_ready_retries` is how often the peer retries a message for which
    /// no receive is posted: 7 means forever. Post the receives first.
    ///
    /// # Errors
    /// Errors of the connection manager.
    pub fn connect(&mut self, receiver_not_ready_retries: u8) -> Result<(), Errno> {
        let mut parameters = self.parameters(receiver_not_ready_retries);
        // SAFETY: the identifier has a queue pair.
        check(unsafe { (self.device.library().rdma_connect)(self.id.raw(), &raw mut parameters) })
    }

    fn parameters(&self, rnr_retry_count: u8) -> rdma_conn_param {
        let (reads, read_by_peer) = self.depths;
        rdma_conn_param {
            private_data: ptr::null(),
            private_data_len: 0,
            responder_resources: read_by_peer,
            initiator_depth: reads,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count,
            srq: 0,
            qp_num: 0,
        }
    }

    /// The first `length` bytes of a slot with a received message.
    #[must_use]
    pub fn received(&self, slot: u16, length: u32) -> &[u8] {
        assert!(!self.posted[usize::from(slot)], "the device may write to it");
        let length = length.min(self.sizes.receive_bytes) as usize;
        &self.memory[self.slot_start(slot)..][..length]
    }

    fn slot_start(&self, slot: u16) -> usize {
        self.begin + usize::from(slot) * self.sizes.receive_bytes as usize
    }

    fn header_start(&self, slot: u16) -> usize {
        self.slot_start(self.sizes.receives) + usize::from(slot) * HEADER_BYTES
    }

    /// Posts a receive into a slot.
    ///
    /// # Errors
    /// Errors of the device; the connection is broken then.
    pub fn post_receive(&mut self, slot: u16) -> Result<(), Errno> {
        let posted = &mut self.posted[usize::from(slot)];
        assert!(!mem::replace(posted, true), "one receive a slot");
        let start = self.slot_start(slot);
        let mut place = ibv_sge {
            addr: self.memory[start..].as_mut_ptr() as u64,
            length: self.sizes.receive_bytes,
            lkey: self.region.key(),
        };
        let mut request = ibv_recv_wr {
            wr_id: RECEIVE | u64::from(slot),
            next: ptr::null_mut(),
            sg_list: &raw mut place,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; the slot is registered, and nothing touches it until the completion (`posted`).
        check(unsafe { ibv_post_recv(self.queue_pair(), &raw mut request, &raw mut bad) })
    }

    fn queue_pair(&self) -> *mut rdma_sys::ibv_qp {
        // SAFETY: the identifier lives.
        unsafe { (*self.id.raw()).qp }
    }

    /// Holds a registered buffer. The positions of its pieces are relative to `origin` (in the coordinates of
    /// [`Buffer::bytes`]).
    pub fn hold(&mut self, buffer: Buffer, origin: isize) -> u32 {
        let held = Some(Held { buffer, origin, posted: 0, released: false });
        match self.held_free.pop() {
            Some(index) => {
                self.held[index as usize] = held;
                index
            }
            None => {
                self.held.push(held);
                self.held.len() as u32 - 1
            }
        }
    }

    /// Releases a buffer once no work request uses it any more.
    pub fn release(&mut self, buffer: u32) {
        if let Some(held) = &mut self.held[buffer as usize] {
            held.released = true;
        }
        self.drop_if_free(buffer);
    }

    /// Returns the buffer if no work request uses it.
    pub fn take(&mut self, buffer: u32) -> Option<Buffer> {
        let held = self.held[buffer as usize].take_if(|held| held.posted == 0)?;
        self.held_free.push(buffer);
        Some(held.buffer)
    }

    fn drop_if_free(&mut self, buffer: u32) {
        if self.held[buffer as usize].take_if(|held| held.released && held.posted == 0).is_some() {
            self.held_free.push(buffer);
        }
    }

    fn unpost(&mut self, buffer: u32) {
        if let Some(held) = &mut self.held[buffer as usize] {
            held.posted -= 1;
        }
        self.drop_if_free(buffer);
    }

    fn element(&mut self, piece: Piece) -> Result<ibv_sge, Errno> {
        let held = self.held[piece.buffer as usize].as_mut().ok_or(Errno::INVAL)?;
        let start = held.origin + piece.start as isize;
        let key = held.buffer.region().ok_or(Errno::INVAL)?.key();
        let bytes = held.buffer.bytes_mut(start..start + piece.length as isize);
        Ok(ibv_sge { addr: bytes.as_mut_ptr() as u64, length: piece.length, lkey: key })
    }

    /// How many messages can be sent now.
    #[must_use]
    pub fn sends_left(&self) -> usize {
        self.headers.len()
    }

    /// Whether any send or transfer is in flight.
    #[must_use]
    pub fn works(&self) -> bool {
        self.work_free.len() < self.work.len()
    }

    /// How many RDMA WRITEs can be started now.
    #[must_use]
    pub fn transfers_left(&self) -> u16 {
        self.transfers.left()
    }

    /// How many RDMA READs can be started now: limited to the number that the peer serves at the same time.
    #[must_use]
    pub fn reads_left(&self) -> u16 {
        self.transfers.reads_left()
    }

    /// Sends a message: up to 32 bytes of header, then at most [`PIECES_MAX`] pieces. Invalidates a token of the peer if one
    /// is given. The completion returns `mark`.
    ///
    /// # Errors
    /// Errors of the device; the connection is broken then.
    pub fn send(
        &mut self,
        header: &[u8],
        pieces: &[Piece],
        invalidate: Option<u32>,
        mark: Option<u64>,
    ) -> Result<(), Errno> {
        assert!(header.len() <= HEADER_BYTES && pieces.len() <= PIECES_MAX, "as many as there is room for");
        let slot = self.headers.pop().ok_or(Errno::NOBUFS)?;
        let start = self.header_start(slot);
        self.memory[start..start + header.len()].copy_from_slice(header);
        let mut elements = [ibv_sge { addr: 0, length: 0, lkey: 0 }; PIECES_MAX + 1];
        elements[0] = ibv_sge {
            addr: self.memory[start..].as_mut_ptr() as u64,
            length: header.len() as u32,
            lkey: self.region.key(),
        };
        let mut buffers = [0; PIECES_MAX];
        for (index, piece) in pieces.iter().enumerate() {
            elements[index + 1] = self.element(*piece)?;
            buffers[index] = piece.buffer;
        }
        let mut request = work_request(&mut elements[..=pieces.len()]);
        request.opcode = ibv_wr_opcode::IBV_WR_SEND;
        if let Some(token) = invalidate {
            request.opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
            request.imm_data_invalidated_rkey_union =
                imm_data_invalidated_rkey_union_t { invalidated_rkey: token };
            // rdma-core's provider for siw reads the token here.
            request.wr = wr_t { rdma: rdma_t { remote_addr: 0, rkey: token } };
        }
        let work = Work::Send { slot, pieces: buffers, count: pieces.len(), mark };
        self.post(&mut request, work, &buffers[..pieces.len()])
    }

    /// Copies a piece to the peer's memory.
    ///
    /// # Errors
    /// Errors of the device; the connection is broken then.
    pub fn write(&mut self, piece: Piece, to: Remote) -> Result<(), Errno> {
        if !self.transfers.begin() {
            return Err(Errno::NOBUFS);
        }
        let work = Work::Write { buffer: piece.buffer, length: piece.length };
        self.transfer(ibv_wr_opcode::IBV_WR_RDMA_WRITE, piece, to, work)
    }

    /// Fills a piece from the peer's memory. The completion returns `mark`.
    ///
    /// # Errors
    /// NOBUFS if [`Endpoint::reads_left`] is 0; errors of the device: the connection is broken then.
    pub fn read(&mut self, piece: Piece, from: Remote, mark: Option<u64>) -> Result<(), Errno> {
        if !self.transfers.begin_read() {
            return Err(Errno::NOBUFS);
        }
        let work = Work::Read { buffer: piece.buffer, length: piece.length, mark };
        self.transfer(ibv_wr_opcode::IBV_WR_RDMA_READ, piece, from, work)
    }

    fn transfer(
        &mut self,
        opcode: ibv_wr_opcode::Type,
        piece: Piece,
        remote: Remote,
        work: Work,
    ) -> Result<(), Errno> {
        let mut elements = [self.element(piece)?];
        let mut request = work_request(&mut elements);
        request.opcode = opcode;
        request.wr = wr_t { rdma: rdma_t { remote_addr: remote.address, rkey: remote.token } };
        self.post(&mut request, work, &[piece.buffer])
    }

    /// Grants the peer access to a part of exposed memory, by a token that the peer can invalidate. Returns that token, which
    /// is valid for messages sent from now on. Uses the room of one transfer.
    ///
    /// # Errors
    /// EINVAL for a range outside of the memory; errors of the device.
    pub fn bind(&mut self, window: &mut Window, at: usize, length: usize) -> Result<u32, Errno> {
        let memory = window.memory();
        if at.checked_add(length).is_none_or(|end| end > memory.length()) {
            return Err(Errno::INVAL);
        }
        if !self.transfers.begin() {
            return Err(Errno::NOBUFS);
        }
        let access = ibv_access_flags::IBV_ACCESS_REMOTE_READ | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        let bind_info = ibv_mw_bind_info {
            mr: memory.region().raw(),
            addr: memory.address() + at as u64,
            length: length as u64,
            mw_access_flags: access.0,
        };
        let token = window.next_token();
        let mut request = work_request(&mut []);
        request.opcode = ibv_wr_opcode::IBV_WR_BIND_MW;
        request.bind_mw_tso_union =
            bind_mw_tso_union_t { bind_mw: bind_mw_t { mw: window.raw(), rkey: token, bind_info } };
        self.post(&mut request, Work::Bind, &[])?;
        window.set_token(token);
        Ok(token)
    }

    fn post(&mut self, request: &mut ibv_send_wr, work: Work, buffers: &[u32]) -> Result<(), Errno> {
        let index = self.work_free.pop().ok_or(Errno::NOBUFS)?;
        request.wr_id = index.into();
        self.work[index as usize] = Some(work);
        for buffer in buffers {
            if let Some(held) = &mut self.held[*buffer as usize] {
                held.posted += 1;
            }
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; headers and held buffers are registered, and stay until the completion arrives
        // (`Held::posted`, `headers`) or the queue pair is destroyed. The call copies the list of elements.
        check(unsafe { ibv_post_send(self.queue_pair(), request, &raw mut bad) })
    }

    /// Returns the completions since the last call. Call it when the notifier reports this endpoint.
    ///
    /// # Errors
    /// Errors of the device; the connection is broken then.
    pub fn poll(&mut self, done: &mut Vec<Completed>) -> Result<(), Errno> {
        // Armed first: a completion after the last poll is signalled.
        // SAFETY: the completion queue lives.
        check(unsafe { ibv_req_notify_cq(self.queue.as_ptr(), 0) })?;
        loop {
            // SAFETY: plain numbers.
            let mut completions: [ibv_wc; POLLED] = unsafe { mem::zeroed() };
            // SAFETY: the completion queue lives, and the array has room for the given number of completions.
            let count = unsafe { ibv_poll_cq(self.queue.as_ptr(), POLLED as i32, completions.as_mut_ptr()) };
            let count = usize::try_from(count).map_err(|_| Errno::IO)?;
            for completion in &completions[..count] {
                let completed = self.completed(completion);
                done.push(completed);
            }
            if count < POLLED {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, completion: &ibv_wc) -> Completed {
        let failure =
            (completion.status != ibv_wc_status::IBV_WC_SUCCESS).then(|| describe(completion.status));
        if completion.wr_id & RECEIVE != 0 {
            let slot = (completion.wr_id & !RECEIVE) as u16;
            self.posted[usize::from(slot)] = false;
            if let Some(failure) = failure {
                return Completed::Failed(match completion.status {
                    ibv_wc_status::IBV_WC_WR_FLUSH_ERR
                    | ibv_wc_status::IBV_WC_LOC_PROT_ERR
                    | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => failure,
                    // Hardware reports LOC_LEN_ERR for a message that is too long; soft-RoCE reports several others,
                    // depending on where in the message it detects the error.
                    _ => Failure::Broken("the peer's message is longer than there is place for, or invalid"),
                });
            }
            debug_assert_eq!(completion.opcode, ibv_wc_opcode::IBV_WC_RECV);
            let has_token = completion.wc_flags & ibv_wc_flags::IBV_WC_WITH_INV.0 != 0;
            // SAFETY: the flag selects the member of the union; both are four bytes.
            let token = unsafe { completion.imm_data_invalidated_rkey_union.invalidated_rkey };
            return Completed::Received {
                slot,
                length: completion.byte_len,
                invalidated: has_token.then_some(token),
            };
        }
        let index = completion.wr_id as u32;
        let Some(work) = self.work.get_mut(index as usize).and_then(Option::take) else {
            return Completed::Failed(Failure::Broken("a completion of nothing"));
        };
        self.work_free.push(index);
        let completed = match work {
            Work::Send { slot, pieces, count, mark } => {
                self.headers.push(slot);
                for buffer in &pieces[..count] {
                    self.unpost(*buffer);
                }
                Completed::Sent(mark)
            }
            Work::Bind => {
                self.transfers.end();
                Completed::Bound
            }
            Work::Write { buffer, length } => {
                self.transfers.end();
                self.unpost(buffer);
                Completed::Written(length)
            }
            Work::Read { buffer, length, mark } => {
                self.transfers.end_read();
                self.unpost(buffer);
                Completed::Fetched(mark, length)
            }
        };
        failure.map_or(completed, Completed::Failed)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let library = self.device.library();
        // SAFETY: this endpoint created all three and destroys them only here; destroying the queue pair ends every access of
        // the device to the memory that is freed afterwards.
        unsafe {
            (library.rdma_disconnect)(self.id.raw());
            if !self.queue_pair().is_null() {
                (library.rdma_destroy_qp)(self.id.raw());
            }
            (library.ibv_destroy_cq)(self.queue.as_ptr());
        }
    }
}

fn work_request(elements: &mut [ibv_sge]) -> ibv_send_wr {
    // SAFETY: numbers, pointers and unions of such, for which all zeros is a valid value.
    let mut request: ibv_send_wr = unsafe { mem::zeroed() };
    request.sg_list = elements.as_mut_ptr();
    request.num_sge = elements.len() as i32;
    request.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
    request
}

/// Describes a failed completion for the log.
fn describe(status: ibv_wc_status::Type) -> Failure {
    Failure::Broken(match status {
        ibv_wc_status::IBV_WC_WR_FLUSH_ERR => return Failure::Flushed,
        ibv_wc_status::IBV_WC_RETRY_EXC_ERR => "the peer does not answer",
        ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR => "the peer had no receive for a message",
        ibv_wc_status::IBV_WC_REM_ACCESS_ERR => "the peer's memory may not be reached by the token it gave",
        ibv_wc_status::IBV_WC_REM_INV_REQ_ERR => "the peer refused a request",
        ibv_wc_status::IBV_WC_REM_OP_ERR => "the peer could not carry out a request",
        ibv_wc_status::IBV_WC_LOC_PROT_ERR | ibv_wc_status::IBV_WC_LOC_ACCESS_ERR => {
            "the device may not reach memory of the server"
        }
        _ => "the device reports an error",
    })
}
