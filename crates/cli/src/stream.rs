//! `godwit stream`: the codec of moves, and others to compare it with, on a recorded migration stream of QEMU's. Needs no controller and
//! no node.

use crate::failure::{Code, Failure};
use crate::quantity::size;
use clap::{Args, Subcommand, ValueEnum};
use godwit_memory::codec::{self, Codec, Decode};
use godwit_memory::{
    Blocks, Clock, Config, Finder, Limits, PAGE_SIZE, PageBytes, Reach, Resends, Spot, SpotTable, Stages,
};
use godwit_units::Bytes;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Subcommand)]
#[command(
    after_help = "A stream is recorded with QMP's `migrate {\"uri\": \"exec:cat > FILE\"}`, or by `godwit-lab capture`. Decoding gives back\nwhat was encoded, byte for byte, unless re-sends were elided."
)]
pub enum StreamCommand {
    /// Make a recorded stream small
    Encode(EncodeArgs),
    /// Make it QEMU's again
    Decode(DecodeArgs),
}

#[derive(Debug, Args)]
pub struct EncodeArgs {
    /// The recorded stream; `-` is standard input
    pub input: PathBuf,
    /// Where to write; `-` is standard output
    pub output: PathBuf,
    /// plain, zstd (a move's without disks), full (a move's), cloudnet (CloudNet's caches and deltas), cloudnet-zstd
    #[arg(long, value_name = "NAME", default_value = "full")]
    pub codec: Codec,
    /// A disk of the VM, raw, as the destination has it; several in the order of the VM's definition. For `full`
    #[arg(long, value_name = "FILE")]
    pub disk: Vec<PathBuf>,
    /// What becomes of pages that come again as they were last sent
    #[arg(long, value_enum, default_value_t = Again::Keep)]
    pub resends: Again,
    /// zstd's level
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub level: i32,
    /// How far back zstd looks for what is alike: far (256 MiB), middle (16 MiB) or near (1 MiB), as moves do where packing is what they wait for. For `zstd` and `full`
    #[arg(long, value_enum, default_value_t = LookBack::Far)]
    pub reach: LookBack,
    /// zstd on a thread of its own beside the one that takes the stream apart, as in a move. For `zstd` and `full`
    #[arg(long)]
    pub beside: bool,
    /// What is kept of what was last sent, for differences; 0: no differences. For `zstd` and `full`
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    pub versions: Bytes,
    /// CloudNet's cache, at each end
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    pub cache: Bytes,
    /// Say what became of the stream, and where the time went
    #[arg(long, value_enum)]
    pub stats: Option<Stats>,
}

#[derive(Debug, Args)]
pub struct DecodeArgs {
    /// What `encode` wrote; `-` is standard input
    pub input: PathBuf,
    /// Where to write QEMU's stream; `-` is standard output
    pub output: PathBuf,
    /// A disk of the VM, raw, as it was given to `encode`, in the same order
    #[arg(long, value_name = "FILE")]
    pub disk: Vec<PathBuf>,
    /// Say how long it took, and with what
    #[arg(long, value_enum)]
    pub stats: Option<Stats>,
}

/// How figures are printed.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Stats {
    /// As a JSON object on standard error, where the stream goes to standard output, and else there.
    Json,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Again {
    /// They stay: decoding gives back every byte.
    Keep,
    /// They are left out, as in a move: decoding gives back a stream with the same RAM.
    Elide,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum LookBack {
    /// Over 256 MiB.
    Far,
    /// Over 16 MiB, without a look for matches over long distances.
    Middle,
    /// Over 1 MiB.
    Near,
}

/// What is read at once, as from a socket.
const PIECE: usize = 256 << 10;

/// Runs it.
///
/// # Errors
/// When a file cannot be read or written, or is none.
pub fn run(command: StreamCommand) -> Result<(), Failure> {
    match command {
        StreamCommand::Encode(args) => encode(&args),
        StreamCommand::Decode(args) => decode(&args),
    }
}

fn encode(args: &EncodeArgs) -> Result<(), Failure> {
    if !args.disk.is_empty() && args.codec != Codec::Full {
        return Err(failure(format!("the codec {} has no use for disks: use `--codec full`", args.codec)));
    }
    let slots = u32::try_from(args.cache.0 / (PAGE_SIZE as u64 / 4)).unwrap_or(u32::MAX);
    let begin = Instant::now();
    let images = Images::open(&args.disk)?;
    let disks =
        (!args.disk.is_empty()).then(|| images.index().map(|it| Box::new(it) as Box<dyn Finder>)).transpose()?;
    let indexing = begin.elapsed();
    let resends = match args.resends {
        Again::Keep => Resends::Keep,
        Again::Elide => Resends::Elide,
    };
    let reach = match args.reach {
        LookBack::Far => Reach::Far,
        LookBack::Middle => Reach::Middle,
        LookBack::Near => Reach::Near,
    };
    let clock = args.stats.map(|_| clock as Clock);
    let (level, versions) = (args.level, args.versions.0);
    let beside = args.beside.then_some(self::clock as Clock);
    let config = Config { level, reach, beside, resends, versions, clock, ..Config::default() };
    let mut encoder = codec::encoder(args.codec, config, disks, slots).map_err(failure)?;
    let mut pipe = Pipe::open(&args.input, &args.output)?;
    let mut out = vec![];
    while let Some(piece) = pipe.read()? {
        pipe.timed(|| encoder.push(&piece, &mut out))?;
        pipe.write(&mut out)?;
    }
    let counted = pipe.timed(|| encoder.finish(&mut out))?;
    pipe.write(&mut out)?;
    pipe.end()?;
    if args.stats.is_some() {
        // The thread of zstd's takes a processor, too.
        pipe.busy += encoder.beside().unwrap_or_default().spent;
        let mut stats = pipe.stats("raw_bytes", "wire_bytes");
        stats.insert("codec".into(), args.codec.name().into());
        stats.insert("index_seconds".into(), indexing.as_secs_f64().into());
        stages(&mut stats, encoder.stages(), "raw_bytes");
        stats.extend(counted.into_iter().map(|(name, n)| (name.into(), n.into())));
        print(&args.output, &stats);
    }
    Ok(())
}

fn decode(args: &DecodeArgs) -> Result<(), Failure> {
    let disks: Option<Box<dyn Blocks>> = match args.disk.is_empty() {
        true => None,
        false => Some(Box::new(Images::open(&args.disk)?)),
    };
    let limits = Limits { versions: u64::MAX, ..Limits::default() };
    let mut decoder = codec::decoder(limits, disks, args.stats.map(|_| clock as Clock));
    let mut pipe = Pipe::open(&args.input, &args.output)?;
    rebuild(&mut *decoder, &mut pipe)?;
    decoder.finish().map_err(failure)?;
    pipe.end()?;
    if args.stats.is_some() {
        let mut stats = pipe.stats("wire_bytes", "raw_bytes");
        stages(&mut stats, decoder.stages(), "raw_bytes");
        print(&args.output, &stats);
    }
    Ok(())
}

/// A few bytes can mean terabytes: what was made is written before more is.
fn rebuild(decoder: &mut dyn Decode, pipe: &mut Pipe<'_>) -> Result<(), Failure> {
    let mut out = vec![];
    while let Some(piece) = pipe.read()? {
        let (mut rest, mut more) = (&piece[..], true);
        while more || !rest.is_empty() {
            more = pipe.timed(|| decoder.push_some(&mut rest, &mut out))?;
            pipe.write(&mut out)?;
        }
    }
    Ok(())
}

fn failure(error: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Failed, error.to_string())
}

fn named(path: &Path) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| failure(format!("{}: {error}", path.display()))
}

/// What this thread has had of a processor: other work on the machine does not count.
fn clock() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Seconds by stage, and how many Gbit/s of raw pages go through what is not zstd: one core's.
fn stages(stats: &mut Figures, stages: Option<Stages>, raw: &str) {
    let Some(stages) = stages else { return };
    let figure = |stats: &Figures, name: &str| stats.get(name).and_then(serde_json::Value::as_f64).unwrap_or_default();
    let (raw, mut rest) = (figure(stats, raw), figure(stats, "seconds"));
    let zstd = stages.zstd.as_secs_f64();
    let rate = |seconds: f64| raw * 8.0 / 1e9 / seconds.max(1e-9);
    stats.insert("gbit_per_s".into(), rate(rest).into());
    stats.insert("gbit_per_s_without_zstd".into(), rate(rest - zstd).into());
    let mut each = Figures::new();
    for (name, time) in stages.named() {
        each.insert(name.into(), time.as_secs_f64().into());
        rest -= time.as_secs_f64();
    }
    each.insert("rest".into(), rest.into());
    stats.insert("stage_seconds".into(), each.into());
}

type Figures = serde_json::Map<String, serde_json::Value>;

fn print(output: &Path, stats: &Figures) {
    let text = serde_json::Value::from(stats.clone()).to_string();
    if output == Path::new("-") { eprintln!("{text}") } else { println!("{text}") }
}

/// From one file to another, counting.
struct Pipe<'a> {
    from: Box<dyn Read>,
    to: Box<dyn Write>,
    names: (&'a Path, &'a Path),
    /// Where the output is until all of it is there; none: it goes straight to what it is for.
    fresh: Option<PathBuf>,
    read: u64,
    written: u64,
    busy: Duration,
    took: Duration,
}

impl<'a> Pipe<'a> {
    fn open(input: &'a Path, output: &'a Path) -> Result<Self, Failure> {
        let from: Box<dyn Read> = match input == Path::new("-") {
            true => Box::new(io::stdin()),
            false => Box::new(File::open(input).map_err(named(input))?),
        };
        // A device or a pipe is written to; a file is there when all of it is, and what was there stays until then: it may be the input.
        let fresh = match std::fs::metadata(output) {
            _ if output == Path::new("-") => None,
            Ok(known) if !known.is_file() => None,
            _ => {
                let mut name = output.as_os_str().to_owned();
                name.push(".new");
                Some(name.into())
            }
        };
        let to: Box<dyn Write> = match output == Path::new("-") {
            true => Box::new(io::stdout()),
            false => Box::new(File::create(fresh.as_deref().unwrap_or(output)).map_err(named(output))?),
        };
        let (names, busy, took) = ((input, output), Duration::ZERO, Duration::ZERO);
        Ok(Self { from, to, names, fresh, read: 0, written: 0, busy, took })
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        let mut piece = vec![];
        let n = self.from.by_ref().take(PIECE as u64).read_to_end(&mut piece).map_err(named(self.names.0))?;
        self.read += n as u64;
        Ok((n > 0).then_some(piece))
    }

    fn timed<T, E: std::fmt::Display>(&mut self, what: impl FnOnce() -> Result<T, E>) -> Result<T, Failure> {
        let (begin, began) = (clock(), Instant::now());
        let result = what();
        self.busy += clock().saturating_sub(begin);
        self.took += began.elapsed();
        result.map_err(|error| failure(format!("{}: {error}", self.names.0.display())))
    }

    fn write(&mut self, out: &mut Vec<u8>) -> Result<(), Failure> {
        self.to.write_all(out).map_err(named(self.names.1))?;
        self.written += out.len() as u64;
        out.clear();
        Ok(())
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.to.flush().map_err(named(self.names.1))?;
        if let Some(fresh) = &self.fresh {
            std::fs::rename(fresh, self.names.1).map_err(named(self.names.1))?;
            self.fresh = None;
        }
        Ok(())
    }

    /// `seconds`: of processors, for the codec alone, with zstd's thread if it has one; `wall_seconds`: until it was done. Files are not counted.
    fn stats(&self, read: &str, written: &str) -> Figures {
        let mut stats = Figures::new();
        stats.insert(read.into(), self.read.into());
        stats.insert(written.into(), self.written.into());
        stats.insert("seconds".into(), self.busy.as_secs_f64().into());
        stats.insert("wall_seconds".into(), self.took.as_secs_f64().into());
        stats
    }
}

impl Drop for Pipe<'_> {
    fn drop(&mut self) {
        if let Some(fresh) = &self.fresh {
            // It came to nothing.
            let _ = std::fs::remove_file(fresh);
        }
    }
}

/// Raw files that are a VM's disks.
#[derive(Clone)]
struct Images(Arc<Vec<(PathBuf, File)>>);

impl Images {
    fn open(paths: &[PathBuf]) -> Result<Self, Failure> {
        let open = |path: &PathBuf| Ok((path.clone(), File::open(path).map_err(named(path))?));
        Ok(Self(Arc::new(paths.iter().map(open).collect::<Result<_, Failure>>()?)))
    }

    /// Reads all of them once.
    fn index(&self) -> Result<Indexed, Failure> {
        let mut blocks = 0;
        for (path, file) in self.0.iter() {
            blocks += file.metadata().map_err(named(path))?.len() / PAGE_SIZE as u64;
        }
        let mut table = SpotTable::new(blocks, 0);
        let mut buffer = vec![0; PIECE];
        for (n, (path, file)) in self.0.iter().enumerate() {
            let disk = u8::try_from(n).map_err(|_| failure("a VM has 256 disks at the most"))?;
            let pages = file.metadata().map_err(named(path))?.len() / PAGE_SIZE as u64;
            let mut page = 0;
            while page < pages {
                let count = (pages - page).min((PIECE / PAGE_SIZE) as u64);
                let piece = &mut buffer[..count as usize * PAGE_SIZE];
                file.read_exact_at(piece, page * PAGE_SIZE as u64).map_err(named(path))?;
                if let Ok(block) = u32::try_from(page) {
                    table.learn(Spot { disk, block }, piece);
                }
                page += count;
            }
        }
        Ok(Indexed(self.clone(), table))
    }
}

impl Blocks for Images {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        let from = u64::from(first.block) * PAGE_SIZE as u64;
        self.0.get(usize::from(first.disk)).is_some_and(|(_, file)| file.read_exact_at(into, from).is_ok())
    }
}

/// Where their contents are.
struct Indexed(Images, SpotTable);

impl Blocks for Indexed {
    fn read(&self, first: Spot, into: &mut [u8]) -> bool {
        self.0.read(first, into)
    }
}

impl Finder for Indexed {
    fn find(&self, content: &PageBytes) -> Option<Spot> {
        self.1.find(content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use godwit_memory::codec::CodecError;

    /// Makes 1 MiB of a byte, and nothing before that is taken away.
    struct Glutton;

    impl Decode for Glutton {
        fn push(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), CodecError> {
            panic!("nothing bounds what this makes")
        }

        fn push_some(&mut self, wire: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, CodecError> {
            assert!(out.is_empty(), "{} bytes were not written", out.len());
            *wire = &wire[1..];
            out.resize(1 << 20, 0);
            Ok(!wire.is_empty())
        }

        fn finish(&mut self) -> Result<(), CodecError> {
            Ok(())
        }
    }

    #[test]
    fn what_a_file_makes_is_written_before_it_makes_more() {
        let nowhere = Path::new("-");
        let mut pipe = Pipe {
            from: Box::new(io::repeat(0).take(20)),
            to: Box::new(io::sink()),
            names: (nowhere, nowhere),
            fresh: None,
            read: 0,
            written: 0,
            busy: Duration::ZERO,
            took: Duration::ZERO,
        };
        assert!(rebuild(&mut Glutton, &mut pipe).is_ok());
        assert_eq!((pipe.read, pipe.written), (20, 20 << 20));
    }
}
