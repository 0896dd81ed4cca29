//! Transfers the same bytes over the same loopback without SMB, to measure the cost of the kernel alone.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::place::{Place, Server};
use crate::torture::{Load, Rate};

/// How the file gets into the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Means {
    /// sendfile(2).
    Sendfile,
    /// pread(2) into one buffer per connection, then send(2).
    Read,
}

/// Answers each byte of a connection with the file's first `io_bytes`. Ends when its standard input ends.
pub(crate) fn serve(means: Means, io_bytes: u64, file: &Path) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    let file: &'static File = Box::leak(Box::new(File::open(file)?));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                // Every run ends with a client that disconnects.
                let _ = answer(means, io_bytes, file, stream);
            });
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn answer(means: Means, io_bytes: u64, file: &File, mut stream: TcpStream) -> Result<()> {
    use std::os::unix::fs::FileExt;
    stream.set_nodelay(true)?;
    let io_bytes = usize::try_from(io_bytes)?;
    let mut buffer = vec![0; if means == Means::Read { io_bytes } else { 0 }];
    let mut requests = [0; 64];
    loop {
        let count = stream.read(&mut requests)?;
        if count == 0 {
            return Ok(());
        }
        for _ in 0..count {
            match means {
                Means::Read => {
                    file.read_exact_at(&mut buffer, 0)?;
                    stream.write_all(&buffer)?;
                }
                Means::Sendfile => {
                    let mut offset = 0;
                    while offset < io_bytes as u64 {
                        let rest = io_bytes - usize::try_from(offset)?;
                        if rustix::fs::sendfile(&stream, file, Some(&mut offset), rest)? == 0 {
                            bail!("the file is shorter than the answer");
                        }
                    }
                }
            }
        }
    }
}

/// Starts the server of a bare loop. Returns it with its port.
pub(crate) fn start(place: &Place, name: &'static str, means: Means, io_bytes: u64) -> Result<(Server, u16)> {
    let file = place.share().join(format!("{name}.dat"));
    std::fs::write(&file, vec![0; usize::try_from(io_bytes)?])?;
    let means = means.to_possible_value().expect("no means is hidden");
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["bare-server", "--means", means.get_name(), "--io-bytes", &io_bytes.to_string(), "--file"]);
    command.arg(&file);
    let mut server = Server::start(place, name, &command, true)?;
    let mut line = String::new();
    BufReader::new(server.stdout().context("its output is a pipe")?).read_line(&mut line)?;
    let port = line.trim().parse().with_context(|| format!("{name} did not start:\n{}", server.said()))?;
    Ok((server, port))
}

/// Keeps `depth` responses in flight on each connection, for the duration of the load.
pub(crate) fn load(port: u16, load: &Load) -> Result<Rate> {
    let received = AtomicU64::new(0);
    let started = Instant::now();
    let end = started + Duration::from_secs(load.seconds.into());
    let outcome: Result<Vec<()>> = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..load.connections).map(|_| scope.spawn(|| client(port, load, end, &received))).collect();
        clients.into_iter().map(|client| client.join().expect("the client does not panic")).collect()
    });
    outcome?;
    let bytes = received.into_inner();
    Ok(Rate { bytes_per_second: bytes as f64 / started.elapsed().as_secs_f64(), bytes })
}

fn client(port: u16, load: &Load, end: Instant, received: &AtomicU64) -> Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; usize::try_from(load.io_bytes)?];
    stream.write_all(&vec![0; load.depth as usize])?;
    while Instant::now() < end {
        stream.read_exact(&mut buffer)?;
        received.fetch_add(load.io_bytes, Ordering::Relaxed);
        stream.write_all(&[0])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_means_answers_each_request_byte_with_the_start_of_the_file() {
        let content: Vec<u8> = (0..100_000_u32).map(|at| (at % 251) as u8).collect();
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(&content).expect("the content is written");
        for means in [Means::Sendfile, Means::Read] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let port = listener.local_addr().expect("its address").port();
            let path = file.path().to_owned();
            let server = std::thread::spawn(move || {
                let (stream, _) = listener.accept().expect("a client");
                answer(means, 65_537, &File::open(path).expect("the file"), stream)
            });
            let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the server");
            stream.write_all(&[0, 0, 0]).expect("three requests");
            let mut got = vec![0; 3 * 65_537];
            stream.read_exact(&mut got).expect("three answers");
            assert!(got.chunks(65_537).all(|answer| answer == &content[..65_537]), "{means:?}");
            drop(stream);
            server.join().expect("no panic").expect("a clean end");
        }
    }

    #[test]
    fn too_short_file_is_an_error_instead_of_an_endless_loop() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut stream = TcpStream::connect(listener.local_addr().expect("its address")).expect("the server");
        stream.write_all(&[0]).expect("a request");
        let (accepted, _) = listener.accept().expect("a client");
        assert!(answer(Means::Sendfile, 10, file.as_file(), accepted).is_err());
    }
}
