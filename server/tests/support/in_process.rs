//! A server in a test's process, on engines of the test's choice.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_server::backend::directory::Volume;
use forebay_server::buffers::BufferPool;
use forebay_server::eventloop::{Arrival, Inbox, Loops, Shared};
use forebay_server::io::Waker;
use forebay_server::lanes::Lanes;
use forebay_server::memory::Memory;
use forebay_server::metrics::{Contents, Metrics};
use forebay_smb::auth::NtHash;
use forebay_smb::engine::{Account, Encryption, Protection, Server, ServerConfig, VolumeConfig};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::negotiate::Dialect;
use rustix::io::Errno;

use super::{Client, DEADLINE, PASSWORD};

/// The parts of a server.
pub struct Setup<'a> {
    /// The folder of the volumes, which are created.
    pub root: &'a Path,
    /// Ids of volumes; the user of volume `v` is `v-user`.
    pub volumes: &'a [String],
    pub event_loops: usize,
    /// Memory for payload, in bytes.
    pub memory: usize,
    pub stall_time_max: Duration,
}

/// A running server.
pub struct InProcess {
    pub server: Arc<Server>,
    pub memory: Arc<Memory>,
    pub metrics: Arc<Metrics>,
    address: SocketAddr,
    loops: Loops,
    threads: Vec<JoinHandle<Result<(), Errno>>>,
    ended: Arc<AtomicBool>,
}

impl Setup<'_> {
    /// Starts a server. `run` creates the engine of an event loop and runs the loop. It gets the engine's waker, the state that
    /// all loops share, and the number of the loop.
    pub fn start<R>(&self, run: R) -> InProcess
    where
        R: Fn(Waker, Shared, usize) -> Result<(), Errno> + Clone + Send + 'static,
    {
        let server = self.server();
        let inboxes: Vec<Inbox> = (0..self.event_loops).map(|_| Inbox::new(Waker::new().unwrap())).collect();
        let loops = Loops::new(inboxes.clone());
        let lanes = Arc::new(Lanes::start(4).unwrap());
        let metrics = Metrics::new("test", lanes.queues().clone(), Box::new(Contents::default), Vec::new());
        let memory = Arc::new(Memory::new(self.memory));
        let shared = Shared {
            server: Arc::clone(&server),
            loops: loops.clone(),
            lanes,
            memory: Arc::clone(&memory),
            buffers: BufferPool::of(memory.budget(), None),
            stall_time_max: self.stall_time_max,
            metrics: Arc::clone(&metrics),
            direct_reads: false,
        };
        let threads = inboxes.iter().enumerate().map(|(index, inbox)| {
            let (run, mut shared, waker) = (run.clone(), shared.clone(), inbox.waker());
            std::thread::spawn(move || {
                shared.buffers = BufferPool::of(shared.memory.budget(), None);
                run(waker, shared, index)
            })
        });
        let threads = threads.collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ended = Arc::new(AtomicBool::new(false));
        let (accepting, to, counted) = (Arc::clone(&ended), loops.clone(), Arc::clone(&metrics));
        std::thread::spawn(move || {
            while let Ok((stream, peer)) = listener.accept() {
                if accepting.load(Ordering::Relaxed) {
                    return;
                }
                assert!(to.accept(Arrival::Socket(stream.into()), peer, &counted));
            }
        });
        InProcess { server, memory, metrics, address, loops, threads, ended }
    }

    fn server(&self) -> Arc<Server> {
        let server = Server::new(ServerConfig {
            guid: [1; 16],
            server_name: "FOREBAY".to_owned(),
            started: 0,
            min_dialect: Dialect::SMB2_0_2,
            target_names: Vec::new(),
            ntlm: true,
            kerberos: None,
            signing_required: false,
            encryption: Encryption::Offered,
            instance: 1,
            predecessors: Vec::new(),
            io_bytes_max: 8 << 20,
            caching: true,
            directory_leases: true,
        });
        for id in self.volumes {
            let path = self.root.join(id);
            std::fs::create_dir(&path).unwrap();
            let account =
                Account { username: format!("{id}-user"), hashes: vec![NtHash::from_password(PASSWORD)] };
            let backend = Volume::open(&path).unwrap();
            let volume = VolumeConfig {
                id: id.clone(),
                backend: backend.handle(),
                accounts: vec![account],
                protection: Protection::default(),
                read_only: false,
                extended_attributes: backend.keeps_extended_attributes(),
                shared_extents: false,
                serial: 1,
                created: 0,
            };
            server.add_volume(volume).unwrap();
        }
        server
    }
}

impl InProcess {
    /// A client that is logged on to volume `id` and connected to it.
    pub fn mount(&self, id: &str) -> Client {
        let mut client = Client::connect(self.address, Dialect::SMB2_1);
        assert_eq!(client.log_on(&format!("{id}-user"), PASSWORD), NtStatus::SUCCESS);
        assert_eq!(client.tree_connect(id), NtStatus::SUCCESS);
        client
    }

    pub fn end(self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        drop(TcpStream::connect(self.address));
        self.loops.drain(Instant::now() + DEADLINE);
        for thread in self.threads {
            thread.join().unwrap().unwrap();
        }
    }
}
