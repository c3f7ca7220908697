#!/usr/bin/perl
# scripts/bench-nbd.pl GODWIT [--rounds N] [--pairs N] [--seconds N] [--only REGEX] [--paired REGEX] [--dir DIR] [--awake 1]
#
# `godwit volume serve` beside nbdkit's file plugin and qemu-nbd, by fio's own NBD engine over unix sockets, one run after the other
# in turn, so that whatever else the machine does hits all of them alike. Ratios are medians of each round's own. Then tracking on
# against off, in pairs.
#
# All serve one file, each for the time of its run. Two files are not alike, whatever is in them: where the kernel has laid a file's
# pages in its cache, and what a virtual machine's host has behind those, is chance, lasts for as long as they are cached, and was
# worth a factor of 1.4.
#
# What else the machine does is kept out as far as may be: fio and all servers have a higher priority, where the user may give it.
# With --awake no processor sleeps: each has a process that runs when nobody else would. A processor that sleeps has to be woken twice for each
# operation at depth 1, in a virtual machine by its host, and that takes more of the server than its own work.
# In the pairs, fio and the server share one processor: whether the scheduler puts them on one or on two is worth a factor of two
# at depth 1, comes by chance, and would hide what is looked for; and each pair is made of several short runs in turn.
use strict;
use warnings;
use File::Temp qw(tempdir);
use JSON::PP;
use POSIX qw(:sys_wait_h);
use Time::HiRes qw(sleep);

my $godwit = shift // die "usage: $0 GODWIT [--rounds N] [--pairs N] [--seconds N] [--only REGEX] [--paired REGEX] [--dir DIR] [--awake 1]\n";
my %o = (rounds => 7, pairs => 20, seconds => 2, only => '.', paired => '.', dir => '/var/tmp', mib => 1024, awake => 0);
while (defined(my $key = shift)) {
    $key =~ s/^--// && exists $o{$key} or die "$0: no option $key\n";
    $o{$key} = shift // die "$0: --$key takes a value\n";
}
my $load = sub { open my $in, '<', '/proc/loadavg' or return ''; (split ' ', <$in>)[0] };
my $favoured = POSIX::nice(-20) ? 'a higher priority' : 'the usual priority';
my $dir = tempdir("$o{dir}/godwit-bench.XXXXXX", CLEANUP => 1);
my %servers = (
    godwit     => sub { ($godwit, 'volume', 'serve', $_[0], '--socket', $_[1]) },
    'no-track' => sub { ($godwit, 'volume', 'serve', $_[0], '--socket', $_[1], '--no-track') },
    nbdkit     => sub { ('nbdkit', '-f', '-U', $_[1], 'file', $_[0]) },
    'qemu-nbd' => sub { ('qemu-nbd', '-t', '-e', '8', '-f', 'raw', '--cache=writeback', '-k', $_[1], $_[0]) },
);
# Runs of each side that a pair is made of.
my $slices = 3;
my ($image, $socket) = ("$dir/bench.img", "$dir/bench.sock");
my ($pid, $serving);
my @awake;
END { my $code = $?; stop(); kill 'KILL', @awake; waitpid $_, 0 for @awake; $? = $code }
$SIG{INT} = $SIG{TERM} = sub { exit 130 };

# Contents that are everywhere and nowhere zero.
sub fill {
    open my $out, '>:raw', $image or die "$image: $!";
    my $piece = pack 'L*', map { int rand 2**32 } 1 .. 2**18;
    print $out $piece or die "$image: $!" for 1 .. $o{mib};
    close $out or die "$image: $!";
}

sub start {
    my ($name) = @_;
    unlink $socket;
    my $child = fork // die "fork: $!";
    if (!$child) {
        open STDOUT, '>', '/dev/null';
        exec $servers{$name}->($image, $socket) or die "$name: $!";
    }
    ($pid, $serving) = ($child, $name);
    for (1 .. 1000) {
        return if -S $socket;
        waitpid($child, WNOHANG) == 0 or do { undef $pid; die "$name ended before it listened\n" };
        sleep 0.02;
    }
    die "$name does not listen\n";
}

sub stop {
    defined $pid or return;
    kill 'TERM', $pid;
    waitpid $pid, 0;
    undef $pid;
}

# Seconds of CPU that the server has taken.
sub cpu {
    open my $in, '<', "/proc/$pid/stat" or die "$serving is gone\n";
    my @fields = split ' ', (<$in> =~ s/^.*\) //r);
    return ($fields[11] + $fields[12]) / POSIX::sysconf(POSIX::_SC_CLK_TCK);
}

# One run of fio on the server that there is, for so long, or once through the file; the job's figures.
sub fio {
    my ($w, $time, @before) = @_;
    my @how = defined $time ? ("--runtime=$time", '--time_based', '--norandommap') : ();
    open my $fio, '-|', @before, 'fio', '--name=bench', '--ioengine=nbd', "--uri=nbd+unix:///?socket=$socket", "--rw=$w->{rw}",
        "--bs=$w->{bs}", "--iodepth=$w->{depth}", "--size=$o{mib}m", '--randrepeat=0', '--output-format=json', @how
        or die "fio: $!";
    my $text = do { local $/; <$fio> };
    close $fio or die "fio failed on $serving\n";
    return decode_json($text =~ s/^.*?(?=^\{)//msr)->{jobs}[0];
}

# One run of a server: operations a second, and its microseconds of CPU for each. All of it on one processor, where one is named.
sub run {
    my ($name, $w, $time, $cpu) = @_;
    my @pinned = defined $cpu ? ('taskset', '-c', $cpu) : ();
    my $writes = $w->{rw} =~ /write/;
    start($name);
    # The marks of regions that are written are made anew by each process: all of the file, then, whoever serves; and no page is dirty.
    if ($writes) {
        fio({ rw => 'write', bs => '1m', depth => 4 });
        system('sync', $image) == 0 or die;
    }
    if ($w->{cold}) {
        system('dd', 'status=none', "of=$image", 'oflag=nocache', 'conv=notrunc', 'count=0') == 0 or die;
    }
    qx(taskset -apc $cpu $pid) if @pinned;
    my $before = cpu();
    # What was read or written once is not cold any more.
    my $job = fio($w, $w->{rw} =~ /rand/ || !$w->{cold} ? $time : undef, @pinned);
    my ($ios, $iops) = map { $job->{read}{$_} + $job->{write}{$_} } qw(total_ios iops);
    my $used = cpu() - $before;
    stop();
    # What is dirty would stay in the cache.
    system 'sync', $image if $writes;
    return { iops => $iops, cpu => $used * 1e6 / $ios };
}

# All of the file in the page cache.
sub warm {
    open my $in, '<:raw', $image or die "$image: $!";
    1 while sysread $in, my $piece, 1 << 20;
}

fill();
system 'sync';
for my $cpu ($o{awake} ? 0 .. qx(nproc) - 1 : ()) {
    my $child = fork // die "fork: $!";
    $child or exec qw(chrt --idle 0 taskset -c), $cpu, $^X, '-e', '$p = getppid; 1 while getppid == $p' or die "chrt: $!";
    push @awake, $child;
}

sub median {
    my @sorted = sort { $a <=> $b } @_;
    return ($sorted[$#sorted / 2] + $sorted[@sorted / 2]) / 2;
}

my @workloads;
for my $cold (0, 1) {
    for my $rw (qw(randread randwrite)) {
        push @workloads, { rw => $rw, bs => '4k', depth => $_, cold => $cold } for 1, 32;
    }
    for my $rw (qw(read write)) {
        push @workloads, { rw => $rw, bs => $_, depth => 4, cold => $cold } for '128k', '1m';
    }
}
$_->{name} = sprintf '%s %-9s %4s x%d', $_->{cold} ? 'cold' : 'warm', @$_{qw(rw bs depth)} for @workloads;
my @wanted = grep { $_->{name} =~ /$o{only}/ } @workloads;

$| = 1;
printf "%s, load %s; fio and the servers have $favoured%s\n", (POSIX::uname)[2], $load->(),
    $o{awake} ? '; no processor sleeps' : '';
print "operations a second, medians of $o{rounds} rounds; CPU: the server's, in microseconds for an operation\n";
printf "%-24s %9s %9s %9s   %8s %8s   %9s %7s %8s\n", '', qw(godwit nbdkit qemu-nbd /nbdkit /qemu-nbd CPU nbdkit qemu-nbd);
for my $w (@wanted) {
    my @names = qw(godwit nbdkit qemu-nbd);
    my (%iops, %cpu);
    warm();
    for my $round (1 .. $o{rounds}) {
        push @names, shift @names;
        for my $name (@names) {
            my $run = run($name, $w, "$o{seconds}s");
            push @{ $iops{$name} }, $run->{iops};
            push @{ $cpu{$name} }, $run->{cpu};
        }
    }
    my %ratio;
    for my $peer (qw(nbdkit qemu-nbd)) {
        $ratio{$peer} = median(map { $iops{godwit}[$_] / $iops{$peer}[$_] } 0 .. $o{rounds} - 1);
    }
    printf "%-24s %9.0f %9.0f %9.0f   %8.2f %8.2f   %9.1f %7.1f %8.1f\n", $w->{name},
        (map { median(@{ $iops{$_} }) } qw(godwit nbdkit qemu-nbd)), @ratio{qw(nbdkit qemu-nbd)},
        (map { median(@{ $cpu{$_} }) } qw(godwit nbdkit qemu-nbd));
}
printf "load %s\n", $load->();
exit 0 if $o{pairs} < 2;

my ($one) = `taskset -cp $$` =~ /(\d+)$/ or die "taskset names no processor\n";
my @sides = qw(godwit no-track);

print "\ntracking on: time for an operation, as a ratio to tracking off; $o{pairs} pairs of $slices runs each\n";
printf "%-24s %8s %8s %8s   %8s %8s\n", '', 'ratio', 'from', 'to (95 %)', 'CPU', 'no-track';
for my $w (grep { !$_->{cold} && $_->{name} =~ /$o{paired}/ } @wanted) {
    my (@logs, %cpu);
    warm();
    for my $pair (1 .. $o{pairs}) {
        my %iops;
        for my $slice (1 .. $slices) {
            for my $name (($pair + $slice) % 2 ? @sides : reverse @sides) {
                my $run = run($name, $w, '500ms', $one);
                $iops{$name} += $run->{iops};
                push @{ $cpu{$name} }, $run->{cpu};
            }
        }
        push @logs, log($iops{'no-track'} / $iops{godwit});
    }
    my ($n, $sum, $squares) = (scalar @logs, 0, 0);
    $sum += $_ for @logs;
    my $mean = $sum / $n;
    $squares += ($_ - $mean)**2 for @logs;
    # Student's t for 19 degrees of freedom; near enough for a few pairs more or less.
    my $half = 2.093 * sqrt($squares / ($n - 1) / $n);
    printf "%-24s %8.3f %8.3f %8.3f   %8.1f %8.1f\n", $w->{name}, exp $mean, exp($mean - $half), exp($mean + $half),
        (map { median(@{ $cpu{$_} }) } @sides);
}
printf "load %s\n", $load->();
