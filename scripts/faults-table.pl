#!/usr/bin/env perl
# scripts/faults-table.pl FOLDER: the reports that scripts/faults.sh left in FOLDER, as a table in Markdown.
use strict;
use warnings;
use JSON::PP;
use List::Util qw(sum0);

my $folder = shift or die "usage: $0 FOLDER\n";
my @points = qw(reserve staged copy-disk memory stopped sealing sealed commit granted started proving releasing settling fill);
my @kinds = qw(node-a node-b nodes qemu-a qemu-b controller cut-1 cut-10 cut-60);
my %said = (
    'node-a' => "source's node killed", 'node-b' => "destination's node killed",
    'nodes' => 'both nodes killed', 'qemu-a' => "source's QEMU killed", 'qemu-b' => "destination's QEMU killed",
    'controller' => 'controller killed', 'cut-1' => 'cut of 1 s', 'cut-10' => 'cut of 10 s', 'cut-60' => 'cut of 60 s',
);
my @checks = qw(memory_ok disk_ok tcp_ok ram_equal wan_carried_disk one_place);
my (%count, %tried, @rows);

sub ms { my $ms = shift; return defined $ms ? sprintf($ms < 10000 ? '%.0f ms' : '%.1f s', $ms < 10000 ? $ms : $ms / 1000) : '-' }
sub is { my ($move, $check) = @_; my $v = $move->{integrity}{$check}; return defined $v ? ($v ? 1 : 0) : undef }

for my $point (@points) {
    for my $kind (@kinds) {
        my $file = "$folder/$kind-$point.json";
        open my $in, '<', $file or next;
        my $report = decode_json(do { local $/; <$in> });
        my @moves = @{ $report->{moves} };
        my ($first, $again) = @moves;
        next unless $first;
        $count{runs}++;
        $tried{$point} = 1;
        my @wrong;
        for my $number (0 .. $#moves) {
            for my $check (@checks) {
                my $ok = is($moves[$number], $check);
                push @wrong, ($number ? "$check (retry)" : $check) if defined $ok && !$ok;
            }
        }
        my $happened = @{ $first->{incidents} } > 0;
        my $rebooted = grep { /was restarted from its disk/ } @{ $first->{integrity}{notes} };
        my $where = $first->{outcome} eq 'completed' ? 'b' : 'a';
        my $placed = is($first, 'one_place');
        $count{lost}++ if !$placed;
        $count{corrupted}++ if grep { /^(memory_ok|disk_ok|ram_equal)/ } @wrong;
        $count{rebooted}++ if $rebooted;
        $count{unhappened}++ if !$happened;
        $count{$first->{outcome}}++;
        push @rows, join ' | ', '', $point, $said{$kind}, $happened ? $first->{outcome} : 'not reached',
            $placed ? ($rebooted ? "$where, restarted from its disk" : $where) : '**nowhere, or twice**',
            ms($first->{downtime_ms}), ms($first->{outage_ms}),
            $again ? $again->{outcome} : ($where eq 'b' ? 'not needed' : '**none**'),
            @wrong ? '**' . join(', ', @wrong) . '**' : 'none', '';
    }
}
my ($commit) = $folder =~ /faults-(\w+)/;
printf "# What a fault at each point of a move does to the guest\n\n";
printf "Written by `scripts/faults.sh TABLE` from the reports of %d runs%s. A guest of 128 MiB under memory, disk and echo load\n",
    $count{runs} // 0, $commit ? " of $commit" : '';
print "moves from `a` to `b`; at the point of its move that the first column names, what the second column names is done to it. Then it\n",
    "is looked for from outside: one QEMU, in the place that Godwit names, whose memory changes. The guest checks its memory and its\n",
    "records, its client the session. Where the move did not complete, a second one follows.\n\n";
printf "%d runs: the first try completed in %d, failed in %d and was cancelled in %d; in %d the guest was restarted from its disk, because\n",
    $count{runs} // 0, map { $count{$_} // 0 } qw(completed failed cancelled rebooted);
printf "its only RAM died with its QEMU. Lost or doubled: %d. Corrupted: %d. Point not reached: %d.\n\n",
    map { $count{$_} // 0 } qw(lost corrupted unhappened);
my @untried = grep { !$tried{$_} } @points;
print "No fault was tried at: ", join(', ', @untried), ".\n\n" if @untried;
print "The pause is the move's own (stop to run), where it completed; the outage is the longest silence at the client.\n\n";
print "| point | fault | first try | the guest runs in | pause | outage | second try | checks that failed |\n|---|---|---|---|---|---|---|---|\n";
s/^ \| /| /, s/ \| $/ |/, print "$_\n" for @rows;
