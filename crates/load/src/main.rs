//! `godwit-load serve`: the program inside the guest.

use std::{
    io::Write,
    net::{SocketAddr, TcpListener, UdpSocket},
    path::PathBuf,
    sync::Arc,
    thread,
};

use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use godwit_load::{
    disk::DiskPlace,
    engine::{Engine, Resources},
    protocol::Listening,
    server::{serve_control, serve_datagrams, serve_echo},
    wire,
};

/// Makes load inside a guest while it is moved, and proves that nothing was lost.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Wait for a host to say what load to make. Prints one line of JSON with the addresses once it listens.
    ///
    /// There is no authentication: whoever reaches the control port can overwrite the given disks. Only for test
    /// guests on networks of their own.
    Serve(Serve),
}

#[derive(Args)]
struct Serve {
    /// Address of the control port; port 0 takes a free one.
    #[arg(long, default_value = "0.0.0.0:7000")]
    listen: SocketAddr,
    /// Address of the echo port, of TCP and of UDP; port 0 takes a free one.
    #[arg(long, default_value = "0.0.0.0:7007")]
    echo: SocketAddr,
    /// Block device or preallocated file that disk loads overwrite from its offset on. May be repeated: loads name it
    /// by its place, counted from 0.
    #[arg(long, value_name = "PATH")]
    disk: Vec<PathBuf>,
    /// Where on the disk the region of disk loads starts; a multiple of 4096. May be repeated: the n-th belongs to the
    /// n-th disk. 0 unless given.
    #[arg(long, value_name = "BYTES")]
    disk_offset: Vec<u64>,
    /// Directory with files that warming reads into the page cache.
    #[arg(long, value_name = "DIR")]
    content: Option<PathBuf>,
    /// Directory with the kernel's sources, for a load that compiles them. Default: where the debian guest has them.
    #[arg(long, value_name = "DIR")]
    kernel: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Serve(serve) => run(serve),
    }
}

fn run(serve: Serve) -> anyhow::Result<()> {
    let (disks, offsets) = (serve.disk.len(), serve.disk_offset.len());
    ensure!(offsets <= disks, "{offsets} --disk-offset for {disks} --disk; give at most one for each disk");
    let offsets = serve.disk_offset.into_iter().chain(std::iter::repeat(0));
    let disks = serve.disk.into_iter().zip(offsets).map(|(path, offset)| DiskPlace { path, offset }).collect();
    let engine = Arc::new(Engine::new(Resources { disks, content: serve.content, kernel: serve.kernel }));

    let listen = |address, port: &str| {
        TcpListener::bind(address)
            .with_context(|| format!("cannot listen on {address}; give a free address with {port}"))
    };
    let control = listen(serve.listen, "--listen")?;
    let echo = listen(serve.echo, "--echo")?;
    let at = echo.local_addr()?;
    let datagrams = UdpSocket::bind(at)
        .with_context(|| format!("cannot listen on {at} by UDP; give a free address with --echo"))?;
    let listening = Listening { control: control.local_addr()?, echo: at, boot_id: engine.boot_id() };
    // Nobody has to be there to read it: under an init without a console, standard output may be closed.
    let _ = wire::write_line(&mut std::io::stdout().lock(), &listening);
    let _ = std::io::stdout().flush();

    thread::Builder::new()
        .name("echo-accept".to_owned())
        .spawn(move || -> () { serve_echo(&echo) })
        .context("cannot start the echo server's thread")?;
    thread::Builder::new()
        .name("echo-datagrams".to_owned())
        .spawn(move || -> () { serve_datagrams(&datagrams) })
        .context("cannot start the thread that echoes datagrams")?;
    serve_control(&control, &engine)
}
